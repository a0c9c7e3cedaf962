"""Runs that are killed or told to stop at any moment, and continue as if nothing had happened."""

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from grpo.extras.testing.commands import Command, command
from grpo.utils.manifest import difference, is_sealed

pytestmark = [pytest.mark.slow, pytest.mark.long]

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
KILLS = int(os.environ.get("KILLS", "9"))
"""How often a run is killed: docs/reliability.md has the outcome of 20."""
FILES = 2000
"""Files that a checkpoint gets, so that it cannot be deleted at once."""
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


def workers(folder: Path) -> list[int]:
    """Processes of reward functions of the runs that were started in a folder."""
    found = [one for one in psutil.process_iter(["cmdline", "cwd"]) if one.info["cwd"] == str(folder)]
    return [one.pid for one in found if "rewards.isolation.worker" in (one.info["cmdline"] or [])]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was not interrupted."""
    folder = tmp_path_factory.mktemp("untouched")
    done = command("grpo.train", *RUN, f"hydra.run.dir={folder / 'run'}", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == STEPS
    return folder / "run"


def interrupt(running: Command, run_dir: Path, moment: str, seconds: float) -> bool:
    """Kill a run at a moment: `any`, after some seconds; `saving` or `deleting` a checkpoint. False if it ended before.

    A checkpoint gets more files once it is sealed, so that deleting it takes long enough to be interrupted.
    """
    begun, started, larger = time.monotonic(), time.time(), {}
    while not running.ended():
        folders, reached = list(run_dir.glob("checkpoint-*")), False
        with contextlib.suppress(FileNotFoundError):  # one that has just been deleted
            if moment == "any":
                reached = time.monotonic() - begun > seconds
            elif moment == "saving":
                reached = any(not is_sealed(folder) and folder.stat().st_mtime > started for folder in folders)
            else:
                reached = any(len(os.listdir(folder)) < count for folder, count in larger.items() if folder in folders)
        for folder in folders if moment == "deleting" and not reached else ():
            if folder not in larger and is_sealed(folder):
                with contextlib.suppress(FileNotFoundError):
                    for number in range(FILES):
                        (folder / f"file-{number}").touch()
                larger[folder] = FILES
        if reached:
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
            return True
        time.sleep(0.001)
    return False


def test_a_run_killed_repeatedly_ends_like_an_uninterrupted_one(untouched: Path, tmp_path: Path) -> None:
    moments, kills = random.Random(7), collections.Counter[str]()
    done, torn_left = [tmp_path / "0"], 0
    while kills.total() < KILLS:
        run_dir, moment = done[-1], ("any", "saving", "deleting")[kills.total() % 3]
        running = Command("grpo.train", *RUN, f"hydra.run.dir={run_dir}", AUTO, cwd=tmp_path)
        if not interrupt(running, run_dir, moment, moments.uniform(1.0, 3.5)):
            assert running.wait().returncode == 0
            done.append(tmp_path / str(len(done)))  # with all steps done it begins anew
            continue
        kills[moment] += 1
        sealed = [folder for folder in run_dir.glob("checkpoint-*") if is_sealed(folder)]
        torn = [folder for folder in run_dir.glob("checkpoint-*") if folder not in sealed or difference(folder)]
        torn_left += bool(torn)
        assert not sealed or any(difference(folder) is None for folder in sealed)
        summary = run_dir / "summary.json"
        status = json.loads(summary.read_text())["status"] if summary.exists() else "running"
        assert status in ("running", "completed")
        if status == "completed":  # killed while it left
            done.append(tmp_path / str(len(done)))
    last = command("grpo.train", *RUN, f"hydra.run.dir={done[-1]}", AUTO, cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    for run_dir in done:
        assert_equal(untouched, run_dir)
    assert not workers(tmp_path)
    print(
        f"killed: {dict(kills)}; of these {torn_left} left a torn checkpoint; runs equal to the untouched: {len(done)}"
    )


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
def test_a_signal_at_any_moment_is_one_line_and_the_run_resumes(
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
    saved = moment == "evaluation_after.jsonl"
    then = (
        f"the same command with {AUTO} continues from its last checkpoint"
        if saved
        else "it has no checkpoint yet: start it again"
    )
    assert done.stderr.splitlines()[-1] == f"grpo.train: stopped: {reason}; {then}"
    if saved:
        again = [text for text in line if "per_device_eval_batch_size" not in text]
        done = command("grpo.train", *again, AUTO, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
        assert outcome(run_dir)["metrics"] == outcome(untouched)["metrics"]


def test_a_signal_to_an_ending_process_keeps_its_line_and_status(tmp_path: Path) -> None:
    ends = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))"
    line = [sys.executable, "-c", f"{ends}; from grpo.train import main; main()", "train.num_generations=3"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("grpo.train: train.num_generations=3")
