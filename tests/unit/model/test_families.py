"""Two tiny layers of each family of transformers: it is planned, generates, and trains, all of it and with LoRA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo.model import policy
from grpo.planning.fit import make_plan
from grpo.testing.stock_trl import VOCABULARY, ours, train

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, **EXPERTS}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **EXPERTS}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"layer_types": ["linear_attention", "full_attention"]}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
EMBEDDED = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
SPARSE = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
SPARSE |= {"mamba_dt_rank": 4}
TWO_WIDTHS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}
QUICK: dict[str, dict[str, Any]] = {
    "gemma3n_text": TWO_WIDTHS | {"intermediate_size": [48, 48], "activation_sparsity_pattern": [0.0, 0.0]},
    "granitemoehybrid": LOCAL | STATES | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 16},
    "jamba": SPARSE | {"num_experts": 4},
    "llama4_text": LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 48, "moe_layers": [1]},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "nemotron_h": ROUTED
    | {"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8}
    | {"mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 16},
    "phimoe": LOCAL,
}
"""Families whose configuration, routers or layers need something of ours."""
DENSE: dict[str, dict[str, Any]] = {
    "doge": {"num_experts": 16},
    "granitemoehybrid": STATES
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48}
    | {"num_local_experts": 0},
    "jamba": SPARSE | {"num_experts": 1, "num_experts_per_tok": 1},
}
"""Families of mixtures, without experts."""
OTHERS: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere2": {},
    "deepseek_v3": LATENT | ROUTED | {"num_key_value_heads": 4, "n_shared_experts": 1},
    "falcon_h1": STATES | {"mamba_d_ssm": 64},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "glm4_moe": ROUTED,
    "gpt2": EMBEDDED,
    "gpt_neox": {},
    "gpt_oss": LOCAL,
    "granitemoe": LOCAL,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 16},
    "minimax": LOCAL | {"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "mixtral": LOCAL,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR | EXPERTS | {"num_experts": 4},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 32, "context_length": 256},
}


def tiny(family: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A random policy of a family, of about 30,000 parameters."""
    torch.manual_seed(0)
    known = AutoConfig.for_model(family)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{name: size for name, size in SIZES.items() if hasattr(known, name)} | sizes)
    )


CASES = [
    *(pytest.param(family, sizes, id=family) for family, sizes in QUICK.items()),
    *(pytest.param(family, sizes, id=f"{family} without experts") for family, sizes in DENSE.items()),
    *(pytest.param(family, sizes, id=family, marks=pytest.mark.slow) for family, sizes in OTHERS.items()),
]


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_each_family_is_planned_and_trains(
    family: str, sizes: dict[str, Any], adapters: bool, composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    model = tiny(family, sizes)
    model.save_pretrained(tmp_path / "model")
    config = composed(f"model.model_name_or_path={tmp_path / 'model'}", *["peft=lora"] * adapters)
    assert make_plan(config).phases
    options = {"peft_config": policy.peft_config(config.peft, config.model), "rollout_func": None}
    logs = train(ours(tmp_path, model=model, max_completion_length=8, **options)).logs
    assert len(logs) == 2
    assert all(log["grad_norm"] > 0 for log in logs)
