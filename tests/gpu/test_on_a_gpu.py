"""What no CPU shows, on any NVIDIA GPU with 16 GB: `make test-gpu`. The experiments are those of benchmarks.gpu."""

from functools import cache
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir

from benchmarks.gpu import LONGEST, run_in_process
from grpo.config.schema import ROOT, register
from grpo.extras.measuring.cases import cases
from grpo.extras.measuring.processes import in_process
from grpo.planning.fit import HEADROOM
from grpo.trainer.shared_prompts.merged import is_exact
from grpo.utils.hardware import free_gpu_memory, gpu_utilization
from grpo.utils.limits import USABLE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@cache
def measured(name: str) -> dict[str, Any]:
    """The result of an experiment at the scale of a GPU, in a process of its own."""
    result = run_in_process(name, toy=False, seconds=2 * LONGEST)
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert "error" not in result, result["error"]
    return result


def test_the_gradient_matches_stock_trl_and_bfloat16_is_no_worse() -> None:
    result = measured("exactness")
    assert max(result["float32 against TRL"].values()) <= 1e-5
    theirs, ours = (result["error in bfloat16"][f"bfloat16 {trainer}"] for trainer in ("trl", "ours"))
    assert ours <= 1.2 * theirs


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs Ampere")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_of_shared_prompts_are_exact(dtype: torch.dtype) -> None:
    assert is_exact(torch.device("cuda"), dtype, heads=14, pairs=2, size=64)


def test_auto_grows_and_stays_within_the_gpu() -> None:
    result = measured("auto")
    tokens = result["update/max_tokens_per_microbatch"]
    assert tokens[-1] > tokens[0]
    assert max(result["memory/update_gb"]) <= USABLE * 1.05 * result["total_gb"]
    assert sum(result["update/oom_retries"]) == 0


@pytest.mark.parametrize("phase", ["generate", "logprobs", "update"])
def test_a_real_oom_is_survived_with_the_same_weights(phase: str) -> None:
    result = measured("OOM retries")[phase]
    assert result["retries"] >= 1
    assert result["weights"] <= 1e-5 or not result["same_completions"]
    assert phase == "generate" or result["same_completions"]


def test_offloading_saves_memory_and_changes_no_bit() -> None:
    result = measured("offloaded to CPU")
    assert all(result["weights bitwise equal"].values())
    for part in ("gradients", "activations"):
        assert result[part]["update_gb"] < result["on the GPU"]["update_gb"], part


def test_optimizers_of_8_bits_and_a_base_of_4_bits_save_memory() -> None:
    result = measured("bitsandbytes")
    assert result["paged_adamw_8bit"]["update_gb"] < result["adamw_8bit"]["update_gb"]
    assert result["adamw_8bit"]["update_gb"] < result["adamw_torch_fused"]["update_gb"]
    for part in result.values():
        assert all(0 < norm < float("inf") for norm in part["grad_norms"])


def test_vllm_matches_the_policy_and_frees_its_memory_asleep() -> None:
    awake, asleep = measured("vllm awake"), measured("vllm asleep")
    assert awake["engine/is_policy"] == asleep["engine/is_policy"] == 1
    assert asleep["update_gb"] < awake["update_gb"]


@pytest.mark.parametrize("cell", ["LoRA 0.5B", "+ checkpointing 0.5B"])
def test_the_plan_is_an_upper_bound_that_is_not_far_off(cell: str) -> None:
    result = measured(f"cell {cell}")
    assert (1 - 3 * HEADROOM) * result["planned_gb"] <= result["allocated_gb"] <= (1 + HEADROOM) * result["planned_gb"]
    assert result["oom_retries"] == 0


def test_measured_cases_are_planned_within_their_headroom() -> None:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        first = cases("cuda")[:2]
    for case in first:
        result, trace = in_process(case, "cuda", 2 * LONGEST)
        assert result, trace
        assert result["outcome"] == "measured", trace
        ratio = result["measured_gb"]["peak"] / case.planned["peak"]
        assert 1 - 3 * HEADROOM <= ratio <= 1 + HEADROOM, case.name
        assert result["reserved_gb"] >= result["measured_gb"]["peak"]


def test_updates_and_whole_steps_are_faster_than_stock_trls() -> None:
    assert all(workload["time_ratio"] > 1 for workload in measured("update").values())
    assert measured("whole step")["ratio"] > 1


def test_the_driver_describes_the_gpu_that_pytorch_uses() -> None:
    found = free_gpu_memory()
    assert found
    assert found[1] == pytest.approx(torch.cuda.get_device_properties(0).total_memory, rel=0.05)
    assert gpu_utilization() is not None
