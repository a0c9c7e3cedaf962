"""A process that gives way to all others: it gets the time of a core and of a disk that nothing else wants."""

import contextlib
import os
from pathlib import Path

import psutil


def give_way() -> None:
    """Give this process the lowest priority, also for its memory: short of it, the system ends this process first.

    What a system refuses or does not know stays as it is.
    """
    with contextlib.suppress(OSError):
        os.nice(19)
    with contextlib.suppress(OSError, AttributeError):  # Linux only; see sched(7)
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
