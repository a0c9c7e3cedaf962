"""Published runs and hardware tables of other GRPO trainers, and what the plan says about them.

The hardware tables are of vision-language models; here they are planned with the text model of the same size, without
images. The published runs are planned with images.
"""

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo.planning import machine
from grpo.planning.advice import advise
from grpo.planning.fit import make_plan

pytestmark = pytest.mark.slow

Compose = Callable[..., DictConfig]

IMAGES = ("task.images=image", "task.conversational=true")
VLM_R1 = (  # github.com/om-ai-lab/VLM-R1/issues/81: OOM after 4 steps; other settings as in its README of that day
    "+gpu=h20",
    "model=qwen2_5_vl_3b",
    *IMAGES,
    "peft=none",
    "launch.processes=6",
    "shard=zero3",
    "train.per_device_train_batch_size=4",
    "train.num_generations=4",
    "train.gradient_accumulation_steps=1",
    "train.gradient_checkpointing=false",
    "train.beta=0.04",
    "train.optim=adamw_torch_fused",
    "task.max_prompt_length=1024",
    "train.max_completion_length=256",
)
EASY_R1 = (  # github.com/hiyouga/EasyR1/issues/59: 726 of 760 GB of host memory; its example configuration offloads
    "+gpu=a100_40gb",
    "model=qwen2_5_vl_7b",
    *IMAGES,
    "peft=none",
    "launch.processes=8",
    "plan.host_gb=760",
    "generation=vllm_colocate",
    "train.vllm_tensor_parallel_size=2",
    "train.beta=0.001",
    "train.optim=adamw_torch_fused",
    "task.max_prompt_length=1024",
    "train.max_completion_length=2048",
)
GR00T = (  # github.com/NVIDIA/Isaac-GR00T/issues/24: GPUs of 24 GB, and four of them; here a backbone of its size
    "+gpu=rtx4090",
    "model=qwen3_vl_2b",
    *IMAGES,
    "peft=none",
    "train.per_device_train_batch_size=8",
    "train.num_generations=8",
    "train.gradient_accumulation_steps=1",
    "train.gradient_checkpointing=false",
    "task.max_pixels=200704",
    "task.max_prompt_length=1024",
    "train.max_completion_length=256",
)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)


def suggested(composed: Compose, line: tuple[str, ...]) -> list[Any]:
    config = composed(*line)
    return [suggestion["overrides"] for suggestion in advise(line, config, make_plan(config))]


def test_vlm_r1s_six_h20_hold_four_small_image_completions(composed: Compose) -> None:
    plan = make_plan(composed(*VLM_R1))
    assert plan.problem is None
    assert plan.settings["rollout.completions_at_once"] == 4
    assert plan.settings["update.max_tokens_per_microbatch"] == 4 * (1024 + 256), "all of them in one micro-batch"
    update = plan.phases["update"]
    assert update["vision activations"] == max(update.values()), "the tower takes more than the language model"
    assert plan.peak_gb == pytest.approx(71, abs=1)
    frozen = make_plan(composed(*VLM_R1, "model.freeze=[vision]"))
    assert plan.peak_gb - frozen.peak_gb > update["vision activations"], "and its gradients and optimizer state"
    checkpointed = make_plan(composed(*VLM_R1, "train.gradient_checkpointing=true"))
    assert checkpointed.peak_gb < plan.peak_gb / 4, "the trainer's own advice, too"


@pytest.mark.parametrize("tokens", [1536, 2048, 4096])
def test_vlm_r1s_run_fits_where_stock_trls_four_at_once_do_not(composed: Compose, tokens: int) -> None:
    line = (*VLM_R1, f"task.max_prompt_length={tokens}")
    at_once = (*line, f"update.max_tokens_per_microbatch={4 * (tokens + 256)}")
    assert "in the update phase" in (make_plan(composed(*at_once)).problem or "")
    assert make_plan(composed(*line)).problem is None
    assert ["update.max_tokens_per_microbatch=auto"] in suggested(composed, at_once)
    assert ["train.gradient_checkpointing=true"] in suggested(composed, at_once)


def test_vlm_r1s_run_with_large_images_is_advised_to_checkpoint(
    composed: Compose,
) -> None:
    line = (*VLM_R1, "task.max_prompt_length=8192")
    assert make_plan(composed(*line)).problem
    found = suggested(composed, line)
    assert ["train.gradient_checkpointing=true"] in found
    assert ["model.freeze=[vision]"] in found


def test_easy_r1s_8_gpus_of_40_gb_need_no_offloading_for_7b(composed: Compose) -> None:
    offloaded = make_plan(composed(*EASY_R1, "shard=fsdp2_offload"))
    assert offloaded.problem is None
    assert offloaded.host_gb < 760 / 2
    assert make_plan(composed(*EASY_R1, "shard=zero3_offload")).host["images"] > 8 * 3, "which 3 GiB each"
    assert suggested(composed, (*EASY_R1, "shard=fsdp2_offload")) == [["shard=fsdp2"]]
    assert make_plan(composed(*EASY_R1, "shard=fsdp2")).problem is None


def test_easy_r1s_host_is_exhausted_by_what_offloading_takes(composed: Compose) -> None:
    line = [word for word in EASY_R1 if not word.startswith("plan.host_gb")]
    needed = make_plan(composed(*line, "shard=fsdp2_offload")).host_gb
    plan = make_plan(composed(*line, "shard=fsdp2_offload", f"plan.host_gb={needed:.0f}"))
    assert "of host memory" in (plan.problem or "")
    assert ["shard=fsdp2"] in suggested(composed, (*line, "shard=fsdp2_offload", f"plan.host_gb={needed:.0f}"))


def test_easy_r1s_7b_does_not_fit_and_is_advised_to_shard_first(composed: Compose) -> None:
    plan = make_plan(composed(*EASY_R1, "shard=none"))
    assert "in the update phase" in (plan.problem or "")
    assert suggested(composed, (*EASY_R1, "shard=none"))[0] == ["shard=fsdp2"]


FULL = ("peft=none", "train.optim=adamw_torch_fused")
GPUS = {12: "rtx3060", 24: "rtx3090", 32: "rtx5090", 40: "a100_40gb", 80: "a100_80gb"}


def test_gr00ts_backbone_fits_24_gb_with_its_tower_frozen(composed: Compose) -> None:
    trained, frozen = make_plan(composed(*GR00T)), make_plan(composed(*GR00T, "model.freeze=[vision]"))
    assert "in the update phase" in (trained.problem or "")
    assert frozen.problem is None
    assert frozen.settings["update.max_tokens_per_microbatch"] >= trained.settings["update.max_tokens_per_microbatch"]
    assert ["model.freeze=[vision]"] in suggested(composed, GR00T)
    four = make_plan(composed(*GR00T, "launch.processes=4", "shard=fsdp2"))
    assert four.problem is None
    assert make_plan(composed(*GR00T, "launch.processes=2", "shard=fsdp2")).problem


@pytest.mark.parametrize(
    ("model", "method", "memory", "count", "parallel"),
    [  # hardware requirements of EasyR1's README: where a larger number of GPUs is theirs, the comment has it
        ("qwen2_5_1_5b", (*FULL, "shard=fsdp2"), 24, 2, 1),
        ("qwen2_5_3b", (*FULL, "shard=fsdp2"), 40, 2, 1),  # 4
        ("qwen2_5_7b", (*FULL, "shard=fsdp2"), 40, 4, 2),  # 8
        ("qwen2_5_32b", (*FULL, "shard=fsdp2"), 80, 16, 2),
        ("qwen2_5_1_5b", FULL, 24, 1, 1),
        ("qwen2_5_3b", FULL, 40, 1, 1),
        ("qwen2_5_7b", (*FULL, "shard=fsdp2", "train.bf16=false"), 40, 2, 2),  # 4
        ("qwen2_5_32b", (*FULL, "shard=fsdp2", "train.bf16=false"), 80, 8, 2),
        ("qwen2_5_1_5b", ("peft=lora",), 12, 1, 1),
        ("qwen2_5_3b", ("peft=lora",), 24, 1, 1),
        ("qwen2_5_7b", ("peft=lora", "shard=fsdp2"), 32, 2, 1),
        ("qwen2_5_32b", ("peft=lora", "shard=fsdp2"), 80, 2, 2),
    ],
)
def test_easy_r1s_models_fit_their_gpus_and_not_half_of_them(
    composed: Compose, model: str, method: tuple[str, ...], memory: int, count: int, parallel: int
) -> None:
    def fits(count: int) -> bool:
        nodes = -(-count // 8)
        workers = (f"launch.processes={count // nodes}", f"launch.nodes={nodes}")
        line = (f"+gpu={GPUS[memory]}", f"model={model}", *method, *workers, "generation=vllm_colocate")
        lengths = ("task.max_prompt_length=1024", "train.max_completion_length=2048")
        return make_plan(composed(*line, *lengths, f"train.vllm_tensor_parallel_size={parallel}")).problem is None

    assert fits(count)
    assert count == 1 or not fits(count // 2)
