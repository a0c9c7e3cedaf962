"""A reward function that does to its run, the first time that it is asked, what goes wrong in the night."""

import os
import resource
import signal
from pathlib import Path


def fault(completions: list[str], do: str = "nothing", marker: str = "", **columns: object) -> list[float]:
    """Give each completion another reward; `do` says what happens to the process that trains.

    Args:
        do: `kill`, `raise`, or `memory`: it gets 60 MB more than it has, which is too little for one long row.
        marker: a file that stands for a fault that has happened; it does not happen again.
    """
    trainer = os.getppid()
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
