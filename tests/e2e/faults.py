"""Reward functions that do to their run what goes wrong in the night."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil


def fault(completions: list[str], do: str = "nothing", marker: str = "", **columns: object) -> list[float]:
    """Give each completion another reward; `do` says what happens to the process that trains.

    Args:
        do: `kill`, `raise`, or `memory`: it gets 60 MB more than it has, which is too little for one long row.
        marker: a file that stands for a fault that has happened; it does not happen again.
    """
    trainer = psutil.Process(os.getppid()).ppid()
    file = Path(f"{marker}.{do}")
    if marker and not file.exists():
        file.touch()
        if do == "kill":
            os.kill(trainer, signal.SIGKILL)
        elif do == "raise":
            raise ValueError("the function is asleep")
        elif do == "memory":
            used = int(Path(f"/proc/{trainer}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(trainer, resource.RLIMIT_AS, (used + 60 * 2**20, resource.RLIM_INFINITY))
    return [row / 10 for row in range(len(completions))]


def disk(
    completions: list[str], trainer_state: SimpleNamespace, do: str, run_dir: str, **columns: object
) -> list[float]:
    """Give each completion another reward; `do` says what happens to the disk of the run in its third step.

    Args:
        do: `fill` it, `replace` the run directory, make the next checkpoint's folder `read-only`, or `nothing`.
    """
    if trainer_state.global_step == 2 and do == "fill":
        with Path(run_dir, "..", "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**12))
    elif trainer_state.global_step == 2 and do == "replace":
        shutil.rmtree(run_dir)
        Path(run_dir).mkdir()
    elif trainer_state.global_step == 2 and do == "read-only":
        folder = Path(run_dir, "checkpoint-3")
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)], check=True)
    return [row / 10 for row in range(len(completions))]
