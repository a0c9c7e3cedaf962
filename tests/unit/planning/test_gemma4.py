"""The plan of Gemma 4's layers, some without keys and values of their own, against the memory that they really take."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.simulation import simulate
from grpo.generation.transformers.growing_cache import CACHE
from grpo.planning.activations import layer_kept
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import kv_cache, update
from grpo.planning.persistent import trained
from grpo.planning.workload import Adapter, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from tests.unit.planning.test_memory import NUMBERS, WORKLOAD, kept_by_autograd, model

SLIDING, FULL = "sliding_attention", "full_attention"
WIDTHS = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 1}
WIDTHS |= {"head_dim": 64, "global_head_dim": 128, "sliding_window": 16}
EMBEDDINGS = {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 600}


def numbers(*kinds: str, **more: Any) -> dict[str, Any]:
    """The numbers of a policy with these layers."""
    family = {"model_type": "gemma4_text", "num_hidden_layers": len(kinds), "layer_types": [*kinds]}
    return NUMBERS | WIDTHS | EMBEDDINGS | family | more


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_keeps_what_autograd_keeps_of_it(method: str, shared: bool) -> None:
    tokens, sizes = 832, []
    for layers in (1, 2):
        policy = model(numbers(FULL, *[FULL] * layers, num_kv_shared_layers=layers if shared else 0))
        if method == "lora":
            policy = get_peft_model(policy, LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear"))
            policy.enable_input_require_grads()
            keep_inputs_uncast(policy)
        sizes.append(kept_by_autograd(policy.train(), tokens))
    workload = Workload(0, tokens, 1, tokens, adapter=Adapter(16) if method == "lora" else None)
    many = shape_of(numbers(*[FULL] * 100, num_kv_shared_layers=99 if shared else 0))
    assert layer_kept(many, workload, tokens, masked=tokens) == pytest.approx(sizes[1] - sizes[0], rel=0.05)
    shape = shape_of(numbers(*[FULL] * 3, num_kv_shared_layers=2 if shared else 0))
    assert trained(shape, workload)[0] == sum(w.numel() for w in policy.parameters() if w.requires_grad)


@pytest.mark.parametrize("more", [{}, {"attention_k_eq_v": True, "num_global_key_value_heads": 2}])
def test_the_parameters_are_those_of_the_built_model(more: dict[str, Any]) -> None:
    kinds = numbers(SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, num_kv_shared_layers=3, **more)
    for wide in (False, True):
        config = model(kinds | {"use_double_wide_mlp": wide})
        described = shape_of(kinds | {"use_double_wide_mlp": wide}).parameters()
        assert config.num_parameters() == described == shape_of(config.config.to_dict()).parameters()


def test_the_cache_is_as_large_as_after_a_real_generation() -> None:
    kinds = numbers(SLIDING, FULL, SLIDING, FULL, num_kv_shared_layers=2)
    prompt = torch.ones(4, 10, dtype=torch.long)
    output = model(kinds).generate(prompt, max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True)
    tensors = [tensor for layer in output[CACHE].layers for tensor in (layer.keys, layer.values)]
    real = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    planned = kv_cache(shape_of(kinds), replace(WORKLOAD, completion=19))  # the last token is not fed in again
    last_of_windows = 4 * 2 * 64 * torch.bfloat16.itemsize  # transformers keeps a token less than the window
    assert planned - last_of_windows == real


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_what_the_simulation_says(method: str, checkpointing: bool) -> None:
    kinds = [SLIDING, SLIDING, FULL] * 2
    wide = {"vocab_size": 8000, "vocab_size_per_layer_input": 8000, "num_attention_heads": 8, "sliding_window": 128}
    policy = numbers(*kinds, **wide, num_kv_shared_layers=3, use_double_wide_mlp=True)
    adapter = Adapter(16) if method == "lora" else None
    workload = Workload(0, 640, 2, 1280, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused")
    parts = update(shape_of(policy), workload)
    simulated = simulate(policy, method, checkpointing, rows=2, length=640)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.05)
