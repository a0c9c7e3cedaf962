"""The weights of a policy for vLLM: all of them under vLLM's names, with adapters merged in, or an adapter as a file.

The policy keeps every bit of its own. Sharded weights are unsharded one at a time.
"""

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

SHARED_MEMORY = Path("/dev/shm")
"""Where files stay in memory, on Linux."""


def is_sharded(model: torch.nn.Module, is_zero3: bool) -> bool:
    """Whether a policy's weights are; before training starts, FSDP has not sharded anything yet."""
    return (
        is_zero3
        or any(isinstance(weight, DTensor) for weight in model.parameters())
        or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    )


def unsharded(weight: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a weight that FSDP2 may shard, unsharded, on a device if given; a collective call."""
    if not isinstance(weight, DTensor):
        return weight.data
    return (weight.to(device) if device and weight.is_cpu else weight).full_tensor()


def policy_weights(
    model: torch.nn.Module,
    gathered: Callable[[list[torch.nn.Parameter]], AbstractContextManager],
    device: torch.device,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and weights, with adapters merged in; sharded weights are unsharded one at a time.

    If the weights are sharded, all processes have to call this.

    Args:
        gathered: a context in which parameters that ZeRO-3 shards are complete.
        device: the device on which FSDP2 unshards.
        only: names of the requested weights; None for all.
    """
    if is_peft_model(model):
        yield from merged_weights(model, only)
        return
    for own_name, weight in model.named_parameters():
        name = own_name.replace("_checkpoint_wrapped_module.", "")
        if only is None or name in only:
            with gathered([weight]):
                yield name, unsharded(weight, device)


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
    originals = {name: (weight, weight.data) for name, weight in layer.named_parameters(recurse=False)}
    try:
        for weight, data in originals.values():
            weight.data = data.clone()
        for adapter in adapters:
            adapter.merge()
        if any(weight.is_cuda for weight, _ in originals.values()):
            torch.cuda.current_stream().synchronize()  # what reads the copies may do so on another stream
        return {name: weight.data for name, (weight, _) in originals.items()}
    finally:
        for adapter in adapters:
            adapter.merged_adapters.clear()
        for weight, data in originals.values():
            weight.data = data


def trains_tied_weight(model: PeftModel) -> bool:
    """Return whether an adapter changes only one of embeddings and head while both are one weight."""
    base = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    text = base.config.get_text_config()  # of some families only the whole configuration says it
    return getattr(text, "tie_word_embeddings", base.config.tie_word_embeddings) and any(
        isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends
    )


def adapter_weights(
    model: PeftModel, gathered: Callable[[list[torch.nn.Parameter]], AbstractContextManager]
) -> dict[str, torch.Tensor]:
    """Return copies of the weights of a policy's adapter on the CPU, under the names of PEFT's files.

    All processes have to call this where the weights are sharded.

    Args:
        gathered: a context in which parameters that ZeRO-3 shards are whole.
    """
    weights = {}
    for name, weight in model.named_parameters():
        if model.prefix in name:
            with gathered([weight]):
                value = unsharded(weight)
                known = name.replace(".default.", ".").replace("_checkpoint_wrapped_module.", "")
                weights[known] = value.to("cpu", copy=True)
    return weights


@contextmanager
def adapter_file(model: PeftModel, weights: dict[str, torch.Tensor]) -> Iterator[Path]:
    """Provide a folder with the adapter in PEFT's format, in memory if there is room, readable by this user only."""
    size = sum(weight.nbytes for weight in weights.values())
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    with tempfile.TemporaryDirectory(prefix="adapter-", dir=SHARED_MEMORY if in_memory else None) as name:
        folder = Path(name)
        model.peft_config["default"].save_pretrained(name)
        save_file(weights, folder / "adapter_model.safetensors")
        for file in folder.iterdir():
            file.chmod(0o600)
        yield folder
