"""The experiments for a GPU at toy size on the CPU, so that nothing but the hardware is new when there is one."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_experiments
from benchmarks.gpu_experiments import EXPERIMENTS, NEEDS_VLLM, TOY

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.vllm] * (name in NEEDS_VLLM)) for name in EXPERIMENTS]
)
def test_every_experiment_runs_at_toy_size_and_finds_its_result(name: str) -> None:
    result = gpu_experiments.run(name, TOY)
    assert json.loads(json.dumps(result)) == result
    if name == "exactness":
        assert max(result["float32 against TRL"].values()) <= 1e-5
        theirs, mine = (result["error in bfloat16"][f"bfloat16 {trainer}"] for trainer in ("trl", "ours"))
        assert 0 < mine < 1.5 * theirs
    if name == "OOM retries":
        for phase in result.values():
            assert phase["retries"] >= 1
            assert phase["same_completions"]
            assert phase["weights"] <= 1e-5
        assert result["update"]["moved"] > 1e-3
    if name == "offloaded to CPU":
        assert all(result["weights bitwise equal"].values())
    if name == "bitsandbytes":
        assert all(min(part["grad_norms"]) > 1e-4 for part in result.values())
    if name == "vllm awake":
        assert result["engine/is_policy"] == 1


def test_bitwise_equal_weights_need_deterministic_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], gpu_experiments.train

    def noted(made: Any) -> Any:
        strict = (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        seen.append((strict, os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        return real(made)

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(gpu_experiments, "train", noted)
    assert all(gpu_experiments.run("offloaded to CPU", TOY)["weights bitwise equal"].values())
    assert seen == [(True, ":4096:8")] * 3
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_vllm_awake_and_asleep_are_processes_of_their_own() -> None:
    modes = [name for name in EXPERIMENTS if name.startswith("vllm")]
    assert modes == ["vllm awake", "vllm asleep"]
    assert set(modes) < set(NEEDS_VLLM)
    assert gpu.names(toy=True) == [*EXPERIMENTS, "cell full 0.5B"]


def test_the_command_writes_json_and_markdown_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu", "--toy", "--output", str(output), "--minutes", "0.02"])
    gpu.main()  # too short for the first experiment
    first = json.loads(output.read_text())["results"]
    assert first["exactness"]["cut_off"]
    done = {"cell full 0.5B": {"planned_gb": 1.0, "seconds": 1.0}, "auto": {"total_gb": 1.0, "seconds": 1.0}}
    output.write_text(json.dumps(json.loads(output.read_text()) | {"results": first | done}))
    capsys.readouterr()
    gpu.main()
    results = json.loads(output.read_text())["results"]
    assert results["exactness"]["cut_off"], "what was cut off is run again"
    assert {name: results[name] for name in done} == done
    assert "Not done: exactness, OOM retries," in " ".join(capsys.readouterr().out.split())
    assert "| auto | 1 | total_gb | 1 |" in output.with_suffix(".md").read_text()
