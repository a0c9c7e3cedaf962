"""Whole commands without the calls of Linux alone, hidden from every process: a run as on a Mac, on its CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.config.schema import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.long]
AS_ON_MACOS = {"AS_ON_MACOS": "1", "PYTHONPATH": f"{ROOT / 'tests' / 'as_on_macos'}{os.pathsep}{ROOT}"}


def train(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "grpo.train", *overrides]
    environment = {**os.environ, **AS_ON_MACOS}
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_a_run_with_rewards_and_tools_trains(tmp_path: Path) -> None:
    done = train(tmp_path, "+experiment=calculator", "train.max_steps=2", "task.eval.size=4", "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["reward_errors"]) == ("completed", 2, {})
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[0]["memory/host_gb"] > 0
    assert metrics[0]["tools/call_frequency"] > 0


def test_a_sweep_runs_its_jobs(tmp_path: Path) -> None:
    done = train(tmp_path, "-m", "train.seed=1,2", "train.max_steps=1", "task.eval.size=0", "hydra.sweep.dir=sweep")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step 1/1") == 2


@pytest.mark.parametrize("option", ["launch.processes=2", "launch.processes=2 train.use_cpu=true"])
def test_several_processes_are_refused_in_one_line(tmp_path: Path, option: str) -> None:
    done = train(tmp_path, *option.split())
    assert (done.returncode, done.stderr) == (2, "grpo.train: launch.processes=2: several processes need Linux\n")
