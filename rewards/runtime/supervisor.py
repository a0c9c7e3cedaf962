"""What the process of a reward function has started ends with it, and with the trainer, however that ends."""

import contextlib
import ctypes
import os
import select
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2): a signal when the parent has died, and to become the parent of orphaned descendants."""


def supervise(trainer: int, *inherited: int) -> None:
    """Return in a new process. This one waits for the end of it or of the trainer, ends what is left, and itself.

    Its exit status is that of the new process. Elsewhere than on Linux, return without a new process.

    Args:
        trainer: process without which the new one has no purpose.
        inherited: file descriptors of which only the new process keeps its own.
    """
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor, child = os.getpid(), os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    for descriptor in inherited:
        os.close(descriptor)

    def stop(*_: Any) -> None:
        raise InterruptedError

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(InterruptedError, ProcessLookupError):
        signal.signal(signal.SIGTERM, stop)
        ends = select.poll()
        for process in (child, trainer):
            ends.register(os.pidfd_open(process), select.POLLIN)
        if os.getppid() == trainer:
            ends.poll()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_as(end_descendants(child))


def end_descendants(child: int) -> int:
    """End all descendants of this process; return the wait status of one of them."""
    import psutil

    status = 0
    while True:
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        try:
            ended, how = os.waitpid(-1, 0)
        except ChildProcessError:
            return status
        if ended == child:
            status = how


def end_as(status: int) -> None:
    """End this process with the wait status of another."""
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # of SIGKILL, which needs no default
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
