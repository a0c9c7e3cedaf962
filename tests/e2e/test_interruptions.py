"""Runs that are killed or told to stop at any moment, and continue as if nothing had happened."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from grpo.manifest import difference, is_sealed
from tests.commands import Command, command

RUN = [
    "peft=lora",
    "train.optim=adamw_8bit",
    "train.num_iterations=2",
    "train.num_train_epochs=2",
    "task.dataset.size=12",
    "task.eval.size=8",
    "train.per_device_train_batch_size=16",
    "train.num_generations=4",
    "train.save_steps=1",
    "train.save_total_limit=2",
    "train.learning_rate=1e-3",
]
"""Three generations an epoch, two steps each: twelve steps."""
STEPS = 12
KILLS = 8
AUTO = "train.resume_from_checkpoint=auto"
CHANGING = ("time/", "step_time", "memory/")


def outcome(run_dir: Path) -> dict[str, Any]:
    """What two runs have to agree in: metrics without times, completions, accuracies, weights."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    files = sorted((run_dir / "completions").glob("*.parquet"))
    return {
        "metrics": [{key: row[key] for key in row if not key.startswith(CHANGING)} for row in rows],
        "completions": {file.name: pyarrow.parquet.read_table(file).to_pylist() for file in files},
        "accuracies": json.loads((run_dir / "evaluation.json").read_text()),
    }


def assert_equal(one: Path, other: Path) -> None:
    for name, value in outcome(one).items():
        assert outcome(other)[name] == value, name
    weights = [load_file(folder / "model" / "adapter_model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def workers() -> set[int]:
    """Processes of reward functions."""
    return {p.pid for p in psutil.process_iter(["cmdline"]) if "rewards.runtime.worker" in (p.info["cmdline"] or [])}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted."""
    folder = tmp_path_factory.mktemp("untouched")
    done = command("grpo.train", *RUN, f"hydra.run.dir={folder / 'run'}", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == STEPS
    return folder / "run"


def test_a_run_that_is_killed_at_random_moments_ends_as_one_that_was_not(untouched: Path, tmp_path: Path) -> None:
    moments, before = random.Random(7), workers()
    run_dir = tmp_path / "run"
    kills = 0
    while kills < KILLS:
        running = Command("grpo.train", *RUN, f"hydra.run.dir={run_dir}", AUTO, cwd=tmp_path)
        deadline = time.monotonic() + moments.uniform(1.0, 3.5)
        while time.monotonic() < deadline and not running.ended():
            time.sleep(0.01)
        if running.ended():
            break
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        kills += 1
        sealed = [folder for folder in run_dir.glob("checkpoint-*") if is_sealed(folder)]
        assert all(difference(folder) is None for folder in sealed[-1:])
        if (run_dir / "summary.json").exists():
            assert json.loads((run_dir / "summary.json").read_text())["status"] == "running"
    done = command("grpo.train", *RUN, f"hydra.run.dir={run_dir}", AUTO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert kills >= 3
    assert_equal(untouched, run_dir)
    assert workers() <= before


def reached(run_dir: Path, what: str) -> Callable[[], bool]:
    """Whether a run has come so far."""
    if what == "loading":
        return lambda: (run_dir / "summary.json").exists()
    return lambda: (run_dir / what).exists() and (run_dir / what).stat().st_size > 0


@pytest.mark.parametrize(
    ("number", "moment", "reason"),
    [
        (signal.SIGTERM, "loading", "SIGTERM while loading"),
        (signal.SIGHUP, "evaluation_before.jsonl", "SIGHUP while evaluating before the training"),
        (signal.SIGTERM, "evaluation_after.jsonl", "SIGTERM while evaluating after the training"),
    ],
)
def test_a_signal_at_any_moment_is_a_line_and_a_summary_and_the_run_continues(
    untouched: Path, tmp_path: Path, number: signal.Signals, moment: str, reason: str
) -> None:
    run_dir = tmp_path / "run"
    # one problem at a time, so that there is time to interrupt an evaluation
    line = [*RUN, "train.per_device_eval_batch_size=1", "task.eval.size=200", f"hydra.run.dir={run_dir}"]
    running = Command("grpo.train", *line, cwd=tmp_path)
    ready, deadline = reached(run_dir, moment), time.monotonic() + 120
    while not ready():
        assert not running.ended()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(running.pid, number)
    done = running.wait(60)
    assert done.returncode == 130, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("stopped", reason)
    assert done.stderr.splitlines()[-1] == f"grpo.train: stopped: {reason}; {AUTO} continues it"
    if moment == "evaluation_after.jsonl":
        again = [text.replace("task.eval.size=200", "task.eval.size=8") for text in line]
        done = command("grpo.train", *again, AUTO, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
        assert outcome(run_dir)["metrics"] == outcome(untouched)["metrics"]
