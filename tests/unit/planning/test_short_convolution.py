"""The plan of layers with gated short convolutions against the memory that PyTorch and PEFT really take."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.simulation import simulate
from grpo.generation.transformers.growing_cache import CACHE
from grpo.planning.activations import layer_kept
from grpo.planning.memory import kv_cache, trained, update
from grpo.planning.shape import shape_of
from grpo.planning.workload import Adapter, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from tests.unit.planning.test_memory import NUMBERS, WORKLOAD, kept_by_autograd, model

CONVOLUTION, ATTENTION = "conv", "full_attention"
HYBRID: dict[str, Any] = {**NUMBERS, "model_type": "lfm2"}


def numbers(*kinds: str, **more: Any) -> dict[str, Any]:
    """The numbers of a policy with these layers; of its feed-forward layers it takes two thirds, rounded up."""
    return HYBRID | {"num_hidden_layers": len(kinds), "layer_types": list(kinds)} | more


@pytest.mark.parametrize("kind", [CONVOLUTION, ATTENTION])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_layer_keeps_what_autograd_keeps_of_it(kind: str, method: str) -> None:
    tokens, sizes = 800, []
    other = ATTENTION if kind == CONVOLUTION else CONVOLUTION
    for kinds in ((other, kind), (other, kind, kind)):
        policy = model(numbers(*kinds))
        if method == "lora":
            policy = get_peft_model(policy, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
            keep_inputs_uncast(policy)
        sizes.append(kept_by_autograd(policy.train(), tokens))
    workload = Workload(0, tokens, 1, tokens, adapter=Adapter(16) if method == "lora" else None)
    shape = shape_of(numbers(*kinds))
    planned = layer_kept(shape, workload, tokens, masked=tokens, by_state=kind == CONVOLUTION)
    assert planned == pytest.approx(sizes[1] - sizes[0], rel=0.03)
    assert trained(shape, workload)[0] == sum(w.numel() for w in policy.parameters() if w.requires_grad)


def test_the_cache_is_as_large_as_after_a_real_generation() -> None:
    kinds = numbers(CONVOLUTION, ATTENTION, CONVOLUTION)
    output = model(kinds).generate(
        torch.ones(4, 10, dtype=torch.long), max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True
    )
    real = 0
    for layer in output[CACHE].layers:
        tensors = (*getattr(layer, "conv_states", {}).values(),) or (layer.keys, layer.values)
        real += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    fed = replace(WORKLOAD, completion=19)  # the last token is not fed in again
    assert kv_cache(shape_of(kinds), fed) == real


def test_layers_follow_from_the_places_of_attention() -> None:
    kinds = numbers(CONVOLUTION, ATTENTION, CONVOLUTION)
    without = {key: value for key, value in kinds.items() if key != "layer_types"}
    assert shape_of(without | {"full_attn_idxs": [1]}) == shape_of(kinds)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_what_the_simulation_says(method: str, checkpointing: bool) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1500, "vocab_size": 8000, "num_attention_heads": 8}
    kinds = numbers(CONVOLUTION, CONVOLUTION, ATTENTION, **wide)
    adapter = Adapter(16) if method == "lora" else None
    workload = Workload(0, 640, 2, 1280, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused")
    parts = update(shape_of(kinds), workload)
    simulated = simulate(kinds, method, checkpointing, rows=2, length=640)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.05)
