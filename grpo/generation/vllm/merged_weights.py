"""The weights of a policy with its adapters merged in, while the policy keeps every bit of its own."""

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper


@torch.no_grad()
def merged_weights(model: PeftModel, only: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield vLLM's name and the value of each weight, with the adapters merged in.

    It merges a copy of a layer with adapters, one layer at a time. TRL merges in place and subtracts the adapter again,
    which rounds twice, and frozen weights in bfloat16 drift.

    Args:
        only: names of the requested weights; None for all.
    """
    adapters = defaultdict(list)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            adapters[module.get_base_layer()].append(module)
    layer, merged = None, dict[str, torch.Tensor]()
    for name, weight in model.named_parameters():
        if model.prefix in name or "original_module" in name:  # the adapters, and what a trained copy stands for
            continue
        known = name.removeprefix("base_model.model.").replace(".base_layer", "")
        for part in ("modules_to_save.default.", "_checkpoint_wrapped_module."):
            known = known.replace(part, "")
        if only is not None and known not in only:
            continue
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        if module in adapters and module is not layer:
            layer, merged = module, merged_copy(module, adapters[module])
        yield known, merged[own_name] if module is layer else weight.data


def merged_copy(layer: torch.nn.Module, adapters: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return a layer's weights with its adapters merged in; the layer itself keeps its bits."""
    own = {name: (weight, weight.data) for name, weight in layer.named_parameters(recurse=False)}
    try:
        for weight, data in own.values():
            weight.data = data.clone()
        for adapter in adapters:
            adapter.merge()
        if any(weight.is_cuda for weight, _ in own.values()):
            torch.cuda.current_stream().synchronize()  # what reads the copies may do so on another stream
        return {name: weight.data for name, (weight, _) in own.items()}
    finally:
        for adapter in adapters:
            adapter.merged_adapters.clear()
        for weight, data in own.values():
            weight.data = data


def trains_tied_weight(model: PeftModel) -> bool:
    """Return whether an adapter changes only one of embeddings and head while both are one weight."""
    base = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    text = base.config.get_text_config()  # of some families only the whole configuration says it
    return getattr(text, "tie_word_embeddings", base.config.tie_word_embeddings) and any(
        isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends
    )
