"""Features of Linux for processes that macOS lacks, each with the closest substitute there."""

import contextlib
import ctypes
import math
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2): a signal when the parent has died, and to become the parent of orphaned descendants."""
MARK = "REWARD_PROCESS"
"""Variable by whose value a supervisor without prctl knows the processes that come from its own."""
LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded before a process forks."""
INTERVAL = 0.5
"""Seconds between two looks at whether the parent is still there, without prctl."""


def has_prctl() -> bool:
    """Whether the kernel tells a process of its parent's end, and gives it its orphaned descendants."""
    return sys.platform == "linux"


def prctl(option: int, value: int) -> None:
    """Set an option of this process; only Linux has them."""
    LIBC.prctl(option, value, 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Let this process get a signal when its parent dies; without prctl a thread looks twice a second."""
    if has_prctl():
        prctl(PR_SET_PDEATHSIG, number)
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, daemon=True).start()


def file_without_name(name: str) -> int:
    """Return the descriptor of a file that is gone with its last descriptor: in memory, or in the temporary folder."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def is_zombie(process: int) -> bool:
    """Whether a child has ended and nothing has waited for it; it stays so.

    Raises:
        ChildProcessError: something has waited for it.
    """
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    import psutil

    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess as error:
        raise ChildProcessError from error


def processors() -> int:
    """Return the number of processors for this process, one of those that a launcher has started on this machine."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(there, quota())) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def quota(root: Path = Path("/")) -> float:
    """Return the processors that a container may use of the machine's; without a quota, infinity.

    The kernel enforces the smallest quota on the way from the process's control group to the root (cgroups(7)).
    """
    number = math.inf
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            mount = root / "sys/fs/cgroup" / ("cpu" if "cpu" in controllers.split(",") else "")
            for folder in (mount / place.lstrip("/"), *(mount / place.lstrip("/")).parents):
                if folder.is_relative_to(mount):
                    number = min(number, quota_of(folder))
    return number


def quota_of(folder: Path) -> float:
    """Return the processors that a control group may use, of version 2 or 1; without a quota, infinity."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        files = [folder / name for name in names]
        if all(file.is_file() for file in files):
            used, period = " ".join(file.read_text() for file in files).split()
            return int(used) / int(period) if used not in ("max", "-1") else math.inf
    return math.inf
