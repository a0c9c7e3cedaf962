"""The plan of latent attention against the memory that it really takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.simulation import simulate
from grpo.generation.transformers.growing_cache import CACHE
from grpo.planning.activations import layer_kept
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import kv_cache, rollout, update
from grpo.planning.persistent import trained
from grpo.planning.workload import Adapter, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from tests.unit.planning.test_memory import NUMBERS, WORKLOAD, kept_by_autograd, model

HEADS = {
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "kv_lora_rank": 128,
}  # one size, for a kernel on CPUs
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1}


def numbers(layers: int, dense: int, rank: int | None = 192, **more: Any) -> dict[str, Any]:
    """The numbers of a policy, of whose layers so many are dense."""
    width = {"hidden_size": 512, "intermediate_size": 1500, "num_attention_heads": 8, "num_key_value_heads": 8}
    own = {"model_type": "deepseek_v3", "num_hidden_layers": layers, "q_lora_rank": rank}
    return NUMBERS | width | HEADS | EXPERTS | own | {"first_k_dense_replace": dense, "head_dim": 16} | more


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("rank", [192, None])
def test_a_layer_keeps_what_autograd_keeps_of_it(method: str, rank: int | None) -> None:
    tokens, sizes = 832, []
    for layers in (1, 2):
        policy = model(numbers(layers, layers, rank))
        if method == "lora":
            policy = get_peft_model(policy, LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear"))
            keep_inputs_uncast(policy)
        sizes.append(kept_by_autograd(policy.train(), tokens))
    workload = Workload(0, tokens, 1, tokens, adapter=Adapter(16) if method == "lora" else None)
    dense = {"n_routed_experts": 0}
    shape = shape_of(numbers(2, 0, rank) | dense)
    assert layer_kept(shape, workload, tokens, masked=tokens) == pytest.approx(sizes[1] - sizes[0], rel=0.05)
    assert trained(shape, workload)[0] == sum(w.numel() for w in policy.parameters() if w.requires_grad)


@pytest.mark.parametrize("rank", [192, None])
def test_the_parameters_are_those_of_the_built_model(rank: int | None) -> None:
    kinds = numbers(3, 1, rank)
    assert shape_of(kinds).parameters() == model(kinds).num_parameters()


def test_the_cache_is_as_large_as_after_a_real_generation() -> None:
    kinds = numbers(2, 2)
    prompt = torch.ones(4, 10, dtype=torch.long)
    output = model(kinds).generate(prompt, max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True)
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in output[CACHE].layers)
    assert kv_cache(shape_of(kinds), replace(WORKLOAD, completion=19)) == real  # the last token is not fed in again


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_token_reads_what_the_cached_latents_expand_to(device: str) -> None:
    kinds = numbers(2, 2)
    attention = model(kinds).model.layers[0].self_attn
    workload = replace(WORKLOAD, device=device, prompt=1, completion=39)  # reading prompts takes less
    latent, rotated = (
        torch.zeros(workload.sequences, 1, workload.sequence, width, dtype=torch.bfloat16) for width in (128, 16)
    )
    keys, values = attention.expand_kv(latent, rotated)
    assert rollout(shape_of(kinds), workload)["activations"] == keys.nbytes + values.untyped_storage().nbytes()


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_what_the_simulation_says(method: str, checkpointing: bool) -> None:
    policy = numbers(3, 3, vocab_size=8000)
    adapter = Adapter(16) if method == "lora" else None
    workload = Workload(0, 640, 2, 1280, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused")
    parts = update(shape_of(policy | {"n_routed_experts": 0}), workload)
    simulated = simulate(policy, method, checkpointing, rows=2, length=640)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.05)
