"""Which adapters vLLM takes as they are, and which policies can have one copy of their frozen weights with it."""

from collections.abc import Callable
from dataclasses import fields

import pytest
from omegaconf import DictConfig
from peft import LoraConfig

from grpo.config.transport import CHANGING, HALF_ADAPTERS, engine_rank, transport_of, why_not

Compose = Callable[..., DictConfig]
COLOCATED = ("generation=vllm_colocate", "peft=lora")
TAKEN = {"r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "bias", "init_lora_weights"}
TAKEN |= {"layers_to_transform", "layers_pattern", "fan_in_fan_out", "lora_dropout"}
NOT_OF_THE_POLICY = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
NOT_OF_THE_POLICY |= {"inference_mode", "runtime_config", "megatron_core", "ensure_weight_tying"}
OF_OTHERS = {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"}
"""Options of other options, which count."""


def test_every_option_of_peft_is_taken_or_merged() -> None:
    assert {field.name for field in fields(LoraConfig)} == TAKEN | set(CHANGING) | NOT_OF_THE_POLICY | OF_OTHERS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"r": 64, "use_rslora": True, "target_modules": "all-linear"}, None),
        ({"target_modules": {"q_proj", "v_proj"}, "init_lora_weights": "gaussian"}, None),
        ({"use_dora": True}, "vLLM's LoRA cannot take peft.use_dora"),
        ({"bias": "lora_only"}, "vLLM's LoRA cannot take peft.bias=lora_only"),
        ({"modules_to_save": ["lm_head"]}, "vLLM's LoRA cannot take peft.modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "vLLM's LoRA cannot take peft.rank_pattern"),
        ({"target_modules": ["q_proj", "lm_head"]}, "vLLM's LoRA cannot take lm_head in peft.target_modules"),
        ({"r": 600}, "vLLM's LoRA takes ranks up to 512, and peft.r=600"),
        ({"init_lora_weights": "pissa"}, "peft.init_lora_weights=pissa changes the weights below the adapter"),
    ],
)
def test_an_adapter_that_vllm_cannot_take_is_merged_for_a_reason(options: dict, reason: str | None) -> None:
    assert why_not(LoraConfig(**options).to_dict()) == reason


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        (["train.vllm_enable_sleep_mode=true"], "a sleeping engine (train.vllm_enable_sleep_mode) discards adapters"),
        (["peft.vision=true"], "vLLM's LoRA cannot take peft.vision=true"),
        (["peft=qlora", "model.dtype=bfloat16", "train.bf16=true"], None),
        (
            ["peft=qlora"],
            "vLLM quantizes only where it computes in half precision (train.bf16=true model.dtype=bfloat16), and this "
            "run computes in float32",
        ),
        (
            ["peft=qlora", "model.dtype=bfloat16", "train.bf16=true", "peft.quantization.bnb_4bit_quant_type=fp4"],
            "vLLM quantizes to nf4 in 4 bits with double quantization, and peft.quantization otherwise",
        ),
        (["generation=vllm_server"], None),
        (["generation=vllm_server", "train.vllm_server_base_url=http://localhost:8000/"], None),
        (
            ["generation=vllm_server", "train.vllm_server_host=10.0.0.3"],
            "the server is on another machine, and vLLM reads adapters from a file",
        ),
    ],
)
def test_a_run_sends_its_adapter_unless_something_is_in_the_way(
    composed: Compose, overrides: list[str], reason: str | None
) -> None:
    transport = transport_of(composed(*COLOCATED, *overrides))
    assert transport.merged_because == reason
    assert transport.adapter == (reason is None)
    assert not transport_of(composed(*COLOCATED, *overrides, "engine.lora=merged")).adapter


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], None),
        (["generation=vllm_server"], "a server has weights of its own"),
        (["peft=none"], "all weights are trained"),
        (["engine.lora=merged"], "vLLM gets merged weights, engine.lora=merged"),
        (
            ["peft=qlora", "model.dtype=bfloat16", "train.bf16=true"],
            "vLLM packs quantized weights (peft.quantization) in its own way",
        ),
        (["train.vllm_tensor_parallel_size=2"], "train.vllm_tensor_parallel_size divides vLLM's weights"),
        (["shard=fsdp2"], "shard divides the policy's weights, or converts them"),
        (["train.bf16=true"], "vLLM computes in bfloat16, and model.dtype=float32"),
    ],
)
def test_frozen_weights_exist_once_unless_something_prevents_it(
    composed: Compose, overrides: list[str], reason: str | None
) -> None:
    assert transport_of(composed(*COLOCATED, *overrides), "llama").unshared_because == reason


def test_a_family_of_unknown_layout_has_weights_of_its_own(composed: Compose) -> None:
    reason = transport_of(composed(*COLOCATED), "olmo2").unshared_because
    assert reason == "vLLM's layers have not been compared with those of olmo2"


def test_an_engine_holds_the_rank_of_the_adapter() -> None:
    assert [engine_rank(rank) for rank in (1, 4, 16, 17, 512)] == [1, 8, 16, 32, 512]


def test_an_adapter_in_float32_is_merged_on_a_gpu(composed: Compose) -> None:
    """vLLM's kernels for adapters end in an assertion."""
    assert transport_of(composed(*COLOCATED)).adapter
    transport = transport_of(composed(*COLOCATED, "+gpu=rtx3080", "model.dtype=float32", "train.bf16=false"))
    assert transport.merged_because == HALF_ADAPTERS
    assert transport_of(composed(*COLOCATED, "+gpu=rtx3080", "model.dtype=bfloat16", "train.bf16=true")).adapter


@pytest.mark.parametrize(
    ("family", "modules", "merged"),
    [
        ("qwen3_moe", "all-linear", True),
        ("qwen3_moe", "[q_proj,up_proj,gate_proj]", True),
        ("qwen3_moe", "[q_proj,v_proj]", False),
        ("gpt_oss", "all-linear", False),
    ],
)
def test_adapters_of_stacked_experts_are_merged_for_vllm(
    family: str, modules: str, merged: bool, composed: Compose
) -> None:
    transport = transport_of(composed(*COLOCATED, f"peft.target_modules={modules}"), family)
    assert transport.merged_because == ("vLLM's LoRA cannot take adapters of stacked experts" if merged else None)
