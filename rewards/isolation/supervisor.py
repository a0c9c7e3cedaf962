"""Ends every process that a reward function has started, at the end of the function's process or of the trainer."""

import contextlib
import ctypes
import os
import signal
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl(2): a signal when the parent has died, and to become the parent of orphaned descendants."""
EVENTS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
INTERVAL = 1.0
"""Seconds between two looks at whether the trainer is still there."""


def supervise(trainer: int, *inherited: int) -> None:
    """Return in a new process. This process waits for its end or the trainer's, ends all that remain, and exits.

    It exits with the status of the new process, which alone keeps the inherited file descriptors.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EVENTS)
    supervisor, child = os.getpid(), os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    for descriptor in inherited:
        os.close(descriptor)
    status = None
    while status is None and os.getppid() == trainer:
        event = signal.sigtimedwait(EVENTS, INTERVAL)
        status = reap().get(child)
        if event and event.si_signo == signal.SIGTERM:
            break
    status = end_descendants(child, status)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # of SIGKILL, which needs no default
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def reap() -> dict[int, int]:
    """Return the wait statuses of children that have ended; orphans that became children are forgotten with it."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = found[1]
    return ended


def end_descendants(child: int, status: int | None) -> int:
    """End all descendants of this process; return the wait status of `child`, known already or found."""
    import psutil

    while left := psutil.Process().children(recursive=True):
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        time.sleep(0.01)
        status = reap().get(child, status)
    return reap().get(child, status) or 0
