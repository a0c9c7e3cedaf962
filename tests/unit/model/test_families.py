"""Two tiny layers of families that need something of ours: planned, generating, trained, all of it and with LoRA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo.model import policy
from grpo.model.adapted import unfit
from grpo.planning.fit import make_plan
from grpo.utils.errors import ConfigError
from tests.stock_trl import VOCABULARY, ours, train

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, **EXPERTS}
ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, **EXPERTS}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
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


def test_adapters_of_experts_need_names_of_parameters(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    tiny("phimoe", LOCAL).save_pretrained(tmp_path / "model")
    line = [f"model.model_name_or_path={tmp_path / 'model'}", "peft=lora", "peft.target_modules=[q_proj]"]
    named = composed(*line, "+peft.target_parameters=[experts.down_proj]")
    assert policy.peft_config(named.peft, named.model).target_parameters == ["experts.down_proj"]
    misspelled = composed(*line, "+peft.target_parameters=[down_prj]")
    with pytest.raises(ConfigError, match="no parameter of the model is named down_prj; its experts have"):
        policy.peft_config(misspelled.peft, misspelled.model)


def test_weights_that_mambas_kernels_read_get_no_adapters(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    """PEFT knows this of some families, and of Granite 4 it does not."""
    granite = tiny("granitemoehybrid", DENSE["granitemoehybrid"])
    assert unfit(granite) == ["model.layers.0.mamba.out_proj"]
    granite.save_pretrained(tmp_path / "model")
    line = [f"model.model_name_or_path={tmp_path / 'model'}", "peft=lora"]
    named = composed(*line, "peft.target_modules=[in_proj,out_proj]")
    with pytest.raises(ConfigError, match="kernels of Mamba read the weight of out_proj by themselves"):
        policy.peft_config(named.peft, named.model)
    allowed = composed(*line, "peft.target_modules=[in_proj,o_proj]")
    assert policy.peft_config(allowed.peft, allowed.model).target_modules == {"in_proj", "o_proj"}
