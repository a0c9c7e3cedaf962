"""Runs on several processes, as a user starts them, for the tests of launching on one machine and on several."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
from safetensors.torch import load_file

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import MACHINE, Forked, forked

RUN = [
    "task.dataset.size=32",
    "task.eval.size=7",
    "train.max_steps=5",
    "train.per_device_train_batch_size=8",
    "train.num_generations=4",
    "train.learning_rate=1e-3",
    "train.save_steps=2",
]
TWO = "launch.processes=2"
AUTO = "train.resume_from_checkpoint=auto"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(
    folder: Path,
    *arguments: str,
    launcher: Sequence[str] = (),
    machine: str | None = None,
    named: bool = True,
    forks: bool = True,
) -> subprocess.Popen[str]:
    """Start a run in `folder`, by our launcher with a directory that is named, or by another with one that it finds.

    Args:
        machine: the network namespace in which it runs.
        named: without it, our launcher finds a directory, too.
        forks: without it, each process starts Python, and is a child of the process that has started it.
    """
    own = [] if launcher or not named else [f"hydra.run.dir={folder / 'run'}"]
    line = [sys.executable, *launcher, "-m", "grpo.train", *RUN, *arguments, *own]
    folder.mkdir(exist_ok=True)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**ENVIRONMENT, **({MACHINE: machine} if machine else {})}
    if not forks:  # then it says by itself how much of torch is logged
        environment.pop("TORCH_CPP_LOG_LEVEL", None)
        line = [*(("ip", "netns", "exec", machine) if machine else ()), *line]
    return (Forked if forks else subprocess.Popen)(line, env=environment, cwd=folder, text=True, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the exit status, the output and what was said on stderr."""
    output, errors = process.communicate(timeout=240)
    return process.returncode, output, errors


def outcome(run_dir: Path) -> dict[str, Any]:
    """What two runs have to agree in."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    changing = ("time/", "step_time", "memory/")
    return {
        "metrics": [{key: row[key] for key in row if not key.startswith(changing)} for row in rows],
        "evaluation": json.loads((run_dir / "evaluation.json").read_text()),
        "weights": {name: one.tolist() for name, one in load_file(run_dir / "model" / "model.safetensors").items()},
    }


def prompts_by_step(run_dir: Path) -> dict[int, list[str]]:
    """The prompts of the completions of each step, in alphabetical order."""
    found: dict[int, list[str]] = {}
    for file in sorted((run_dir / "completions").glob("*.parquet")):
        for row in pyarrow.parquet.read_table(file, columns=["step", "prompt"]).to_pylist():
            found.setdefault(row["step"], []).append(str(row["prompt"]))
    return {step: sorted(prompts) for step, prompts in found.items()}


def processes_of(run_dir: Path) -> dict[int, psutil.Process]:
    """Return the processes that train in a directory, by their rank."""
    found = {}
    for pid, note in forked().items():
        if f"hydra.run.dir='{run_dir}'" in note["line"] and psutil.pid_exists(pid):
            found[int(note["rank"])] = psutil.Process(pid)
    for one in psutil.process_iter(["cmdline"]):
        if f"hydra.run.dir='{run_dir}'" in (one.info["cmdline"] or []):
            found[int(one.environ()["RANK"])] = one
    return found


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended; one whose parent has ended too may stay as a zombie for ever."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool], running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None, ended(running)
        assert time.monotonic() < deadline
        time.sleep(0.02)
