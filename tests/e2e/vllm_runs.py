"""Runs with the real vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import Forked

SMALL = [
    "generation=vllm_colocate",
    "peft=lora",
    "train.max_steps=4",
    "train.per_device_train_batch_size=16",
    "train.num_generations=4",
    "task.eval.size=16",
]

FILTERS = ["train.top_k=10", "train.top_p=0.9", "train.min_p=0.01"]


def module(name: str, *arguments: object) -> tuple[subprocess.CompletedProcess[str], list[psutil.Process]]:
    """Run a module in a session of its own; return what it said, and which processes of the session are left."""
    process = Forked(
        [sys.executable, "-m", name, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    out, said = process.communicate(timeout=300)
    left = [
        other for other in psutil.process_iter() if session(other) == process.pid and other.status() != "zombie"
    ]  # a zombie has ended, and waits for a parent to look
    return subprocess.CompletedProcess(process.args, process.returncode, out, said), left


def session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def result(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
