"""The plan of layers with gated DeltaNet, Mamba 2 or short convolutions, against the memory that they really take."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from benchmarks.simulation import simulate
from grpo.generation.transformers.growing_cache import CACHE
from grpo.model.adapted import pattern_of, unfit
from grpo.planning.activations import layer_kept
from grpo.planning.duration import operations
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import kv_cache, rollout, update
from grpo.planning.persistent import trained
from grpo.planning.workload import Adapter, Sharding, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from tests.unit.planning.test_memory import NUMBERS, WORKLOAD, kept_by_autograd, model

HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 16}
STATE, ATTENTION, CONVOLUTION, MAMBA = "linear_attention", "full_attention", "conv", "mamba"
GRANITE = {"model_type": "granitemoehybrid", "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8}
GRANITE |= {"mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 64}

BESIDE, ALONE = "beside attention", "feed-forward layers alone"
FAMILIES: dict[str, dict[str, Any]] = {
    BESIDE: {"model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 64}
    | {"mamba_n_groups": 1, "mamba_rms_norm": False},
    ALONE: {"model_type": "nemotron_h", "mamba_num_heads": 8, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 64},
}
"""Families of Mamba 2 whose layers are built in another way."""


def in_blocks(family: str, layers: int, **more: Any) -> dict[str, Any]:
    """The numbers of a policy of such a family; Nemotron-H has as many layers and feed-forward layers after them."""
    sizes = NUMBERS | {"num_hidden_layers": layers, "tie_word_embeddings": False} | more | FAMILIES[family]
    width = {"mamba_d_head": sizes["hidden_size"] // 8, "mamba_d_ssm": sizes["hidden_size"]}
    if family == BESIDE:
        return sizes | width
    blocks = [block for layer in range(layers) for block in (STATE if layer else ATTENTION, "mlp")]
    sizes.pop("num_hidden_layers")
    return sizes | {"mamba_head_dim": width["mamba_d_head"], "layers_block_type": blocks}


def numbers(*kinds: str, **more: Any) -> dict[str, Any]:
    """The numbers of a policy with these layers; of LFM2's feed-forward layers it takes two thirds, rounded up."""
    sizes = NUMBERS | more | {"num_hidden_layers": len(kinds)}
    if MAMBA in kinds:
        blocks = ["attention" if kind == ATTENTION else kind for kind in kinds]
        widths = {"shared_intermediate_size": sizes["intermediate_size"], "mamba_d_head": sizes["hidden_size"] // 4}
        return sizes | GRANITE | widths | {"layers_block_type": blocks}
    family = {"model_type": "lfm2"} if CONVOLUTION in kinds else {"model_type": "qwen3_5_text", **HEADS, **more}
    return sizes | family | {"layer_types": list(kinds)}


@pytest.mark.parametrize(
    ("kind", "other"), [(STATE, ATTENTION), (ATTENTION, STATE), (CONVOLUTION, ATTENTION), (MAMBA, ATTENTION)]
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_layer_keeps_what_autograd_keeps_of_it(kind: str, other: str, method: str) -> None:
    tokens, sizes = 832, []  # 13 chunks
    for kinds in ((other, kind), (other, kind, kind)):
        policy = model(numbers(*kinds))
        if method == "lora":
            linear = {"target_modules": "all-linear", "exclude_modules": pattern_of(unfit(policy))}
            policy = get_peft_model(policy, LoraConfig(r=16, task_type="CAUSAL_LM", **linear))
            keep_inputs_uncast(policy)
        sizes.append(kept_by_autograd(policy.train(), tokens))
    workload = Workload(0, tokens, 1, tokens, adapter=Adapter(16) if method == "lora" else None)
    shape = shape_of(numbers(*kinds))
    planned = layer_kept(shape, workload, tokens, masked=tokens, by_state=kind != ATTENTION)
    assert planned == pytest.approx(sizes[1] - sizes[0], rel=0.05)
    assert trained(shape, workload)[0] == sum(w.numel() for w in policy.parameters() if w.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_other_blocks_keep_what_autograd_keeps_of_them(family: str, method: str) -> None:
    tokens, sizes = 832, []
    for layers in (2, 3):
        policy = model(in_blocks(family, layers, hidden_size=256, intermediate_size=640))
        if method == "lora":
            linear = {"target_modules": "all-linear", "exclude_modules": pattern_of(unfit(policy))}
            policy = get_peft_model(policy, LoraConfig(r=16, task_type="CAUSAL_LM", **linear))
            keep_inputs_uncast(policy)
        sizes.append(kept_by_autograd(policy.train(), tokens))
    workload = Workload(0, tokens, 1, tokens, adapter=Adapter(16) if method == "lora" else None)
    shape = shape_of(in_blocks(family, 3, hidden_size=256, intermediate_size=640))
    planned = layer_kept(shape, workload, tokens, masked=tokens, by_state=family == ALONE)
    assert planned == pytest.approx(sizes[1] - sizes[0], rel=0.05)
    assert trained(shape, workload)[0] == sum(w.numel() for w in policy.parameters() if w.requires_grad)


@pytest.mark.parametrize("kind", [STATE, CONVOLUTION, MAMBA, BESIDE, ALONE])
def test_the_cache_is_as_large_as_after_a_real_generation(kind: str) -> None:
    kinds = in_blocks(kind, 3) if kind in FAMILIES else numbers(kind, ATTENTION, kind)
    policy = model(kinds)
    output = policy.generate(
        torch.ones(4, 10, dtype=torch.long), max_new_tokens=20, min_new_tokens=20, return_dict_in_generate=True
    )
    real = 0
    for layer in output[CACHE].layers:
        states = (*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values())
        tensors = (*states, getattr(layer, "keys", None), getattr(layer, "values", None))
        real += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    fed = replace(WORKLOAD, completion=19)  # the last token is not fed in again
    assert kv_cache(shape_of(kinds), fed) == real


def test_a_state_takes_operations_of_no_length() -> None:
    shape = shape_of(numbers(STATE, ATTENTION, STATE, STATE))
    longer = operations(shape, 2000) - operations(shape, 1000)
    assert longer == 2 * shape.query_width * 1000
    assert shape_of(numbers(*[STATE] * 3)).attention_layers == 0


def test_layers_follow_from_an_interval_as_from_their_list() -> None:
    kinds = (STATE, STATE, ATTENTION)
    without = {key: value for key, value in numbers(*kinds).items() if key != "layer_types"}
    assert shape_of(without | {"full_attention_interval": 3}) == shape_of(numbers(*kinds))
    convolutions = numbers(CONVOLUTION, ATTENTION, CONVOLUTION)
    without = {key: value for key, value in convolutions.items() if key != "layer_types"}
    assert shape_of(without | {"full_attn_idxs": [1]}) == shape_of(convolutions)


@pytest.mark.parametrize("kind", [pytest.param(STATE, marks=pytest.mark.slow), CONVOLUTION, MAMBA, BESIDE, ALONE])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_what_the_simulation_says(kind: str, method: str, checkpointing: bool) -> None:
    heads = {"linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
    wide = {"hidden_size": 512, "intermediate_size": 1500, "vocab_size": 8000, "num_attention_heads": 8, **heads}
    kinds = in_blocks(kind, 3, **wide) if kind in FAMILIES else numbers(kind, kind, ATTENTION, **wide)
    adapter = Adapter(16) if method == "lora" else None
    workload = Workload(0, 640, 2, 1280, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused")
    parts = update(shape_of(kinds), workload)
    simulated = simulate(kinds, method, checkpointing, rows=2, length=640)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("sharding", [Sharding(), Sharding("deepspeed", 2, 2)])
def test_states_count_twice_where_a_step_is_recorded(sharding: Sharding) -> None:
    """A GPU records it, unless the weights are divided."""
    shape = shape_of(numbers(STATE, ATTENTION))
    workload = replace(WORKLOAD, device="cuda", sequences=64, prompt=2, completion=64)
    divided = replace(workload, sharding=Sharding("fsdp", 2, 2))
    recorded, not_recorded = (rollout(shape, of)["kv cache"] for of in (replace(workload, sharding=sharding), divided))
    assert not_recorded == kv_cache(shape, workload)
    assert recorded - not_recorded == workload.sequences * shape.recurrent.cache(workload.compute_bytes)
