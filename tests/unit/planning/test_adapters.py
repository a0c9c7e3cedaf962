"""The planned number of LoRA's parameters, and memory of adapted experts, against PEFT's."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer import add_fused_lm_head

from benchmarks.simulation import PeakTracker
from benchmarks.tiny_policies import tiny_config
from grpo.config.transport import STACKED
from grpo.planning.adapters import adapter_parameters, stacks
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import update
from grpo.planning.persistent import persistent
from grpo.planning.workload import Adapter, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast

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


def test_all_linear_adapts_experts_of_converted_families_alone() -> None:
    shape = shape_of(tiny_config("qwen3_moe").to_dict())
    assert stacks(shape, Adapter(4)) == [(8, 32, 64), (4, 32, 32)]
    assert stacks(replace(shape, model_type="gpt_oss"), Adapter(4)) == []


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_update_of_adapted_experts_takes_what_is_planned(family: str, checkpointing: bool) -> None:
    tokens, wide = 100, {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_experts": 16}
    numbers = {**wide, "num_local_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 3, "head_dim": 64}
    config = AutoConfig.for_model(family, **numbers, num_attention_heads=4, num_key_value_heads=2, vocab_size=500)
    policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    add_fused_lm_head(policy, outputs=("log_probs", "entropy"))
    policy = get_peft_model(policy, lora(ATTENTION[:1], EXPERTS))
    keep_inputs_uncast(policy)
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        policy.enable_input_require_grads()
    optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], foreach=False)
    tracker = PeakTracker()
    tracker.track_external(policy.train(), optimizer)
    ids = torch.arange(tokens)[None]
    with tracker, torch.autocast("cpu", torch.bfloat16):
        for step in range(4):
            policy(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    taken = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    adapter = Adapter(8, ATTENTION[:1], EXPERTS)
    workload = Workload(
        0, tokens, 1, tokens, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused"
    )
    parts = update(shape_of(config.to_dict()), workload)
    assert sum(parts.values()) - parts["context"] == pytest.approx(taken, rel=0.08)
