"""The planned number of LoRA's parameters against PEFT's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN
from transformers import AutoModelForCausalLM

from benchmarks.tiny_policies import tiny_config
from grpo.planning.adapters import STACKED, adapter_parameters, stacks
from grpo.planning.memory import persistent
from grpo.planning.shape import shape_of
from grpo.planning.workload import Adapter, Workload

ATTENTION = ("q_proj", "v_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "gpt_oss", "qwen3_5_moe_text", "qwen3_next"])
@pytest.mark.parametrize(
    ("modules", "parameters"),
    [(None, ()), (ATTENTION, ()), (FEED_FORWARD, ()), ((), EXPERTS), (ATTENTION, EXPERTS[1:])],
    ids=["all-linear", "attention", "feed-forward", "experts", "attention and experts"],
)
def test_the_adapter_has_as_many_parameters_as_pefts(
    family: str, modules: tuple[str, ...] | None, parameters: tuple[str, ...]
) -> None:
    config = tiny_config(family)
    shape = shape_of(config.to_dict())
    if (parameters and not shape.num_experts) or (modules == FEED_FORWARD and family in ("mixtral", "gpt_oss")):
        pytest.skip("it has no such weights")
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(config)
        adapted = get_peft_model(policy, lora(modules, parameters), low_cpu_mem_usage=True)
    trained = [weight.numel() for weight in adapted.parameters() if weight.requires_grad]
    adapter = Adapter(8, modules, parameters)
    assert adapter_parameters(shape, adapter) == sum(trained)
    assert persistent(shape, Workload(10, 30, 4, 160, adapter=adapter))["adapter"] == 4 * sum(trained)


def lora(modules: tuple[str, ...] | None, parameters: tuple[str, ...]) -> LoraConfig:
    """LoRA of rank 8."""
    targets: Any = "all-linear" if modules is None else list(modules)
    return LoraConfig(r=8, target_modules=targets, target_parameters=list(parameters) or None, task_type="CAUSAL_LM")


def test_stacked_experts_are_those_that_peft_converts() -> None:
    known = {family for family, like in _MODEL_TO_CONVERSION_PATTERN.items() if like in ("mixtral", "qwen2_moe")}
    assert known == STACKED


def test_a_pattern_of_modules_may_mean_experts() -> None:
    shape = shape_of(tiny_config("qwen3_moe").to_dict())
    assert stacks(shape, Adapter(4)) == [(8, 32, 64), (4, 32, 32)]
    assert stacks(replace(shape, model_type="gpt_oss"), Adapter(4)) == []
