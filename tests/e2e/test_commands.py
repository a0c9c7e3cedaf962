"""Commands by the console script, which other processes start again by their modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = ["train.max_steps=1", "train.per_device_train_batch_size=8", "train.num_generations=4"]
QUICK += ["task.dataset.size=16", "task.eval.size=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def grpo(*words: str, cwd: Path, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    script = (
        [str(Path(sys.executable).with_name("grpo"))] if not launcher else [sys.executable, *launcher, "-m", "grpo"]
    )
    return subprocess.run(
        [*script, *words], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.slow
def test_a_sweep_by_the_script_has_jobs_of_their_own(tmp_path: Path) -> None:
    done = grpo("train", "-m", "train.seed=1,2", "hydra.sweep.dir=sweep", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for job in ("0", "1"):
        assert json.loads((tmp_path / "sweep" / job / "summary.json").read_text())["status"] == "completed"
        assert "    name: train\n" in (tmp_path / "sweep" / job / ".hydra" / "hydra.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--nproc-per-node=2")], ids=["ours", "torchrun"]
)
def test_two_processes_start_by_the_script(launcher: tuple[str, ...], tmp_path: Path) -> None:
    processes = () if launcher else ("launch.processes=2",)
    done = grpo("train", "hydra.run.dir=run", *processes, *QUICK, cwd=tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["completions_a_step"]) == ("completed", 16)
