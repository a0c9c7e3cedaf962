"""What Linux has for processes and macOS lacks, each with what comes closest to it there."""

import ctypes
import os
import sys
import tempfile
import threading
import time

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
    return max(1, there // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
