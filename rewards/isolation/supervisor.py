"""Ends every process that a reward function has started, at the end of the function's process or of the trainer."""

import contextlib
import os
import signal
import time

from rewards.isolation.system import MARK, PR_SET_CHILD_SUBREAPER, end_with_parent, has_prctl, prctl

EVENTS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
INTERVAL = 1.0
"""Seconds between two looks at whether the trainer is still there."""
POLLED = 0.2
"""The same, seconds, where a process cannot wait for a signal for a limited time."""


def supervise(trainer: int, *inherited: int) -> None:
    """Return in a new process. This process waits for its end or the trainer's, ends all that remain, and exits.

    It exits with the status of the new process, which alone keeps the inherited file descriptors.
    """
    if has_prctl():
        prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, EVENTS)
    supervisor, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != supervisor:
            os._exit(1)
        return
    for descriptor in inherited:
        os.close(descriptor)
    status = None
    while status is None and os.getppid() == trainer:
        ends = next_event() == signal.SIGTERM
        status = reap().get(child)
        if ends:
            break
    status = end_descendants(child, status)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # of SIGKILL, which needs no default
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def next_event() -> int | None:
    """Wait for one of `EVENTS`, which are blocked, or for a while; return its number, or None after the while."""
    if hasattr(signal, "sigtimedwait"):
        event = signal.sigtimedwait(EVENTS, INTERVAL)
        return event and event.si_signo
    time.sleep(POLLED)
    return signal.SIGTERM if signal.SIGTERM in signal.sigpending() else None


def reap() -> dict[int, int]:
    """Return the wait statuses of children that have ended; orphans that became children are forgotten with it."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (waited := os.waitpid(-1, os.WNOHANG))[0]:
            ended[waited[0]] = waited[1]
    return ended


def descendants() -> set:
    """Return the descendants of this process.

    Without prctl, orphans are found by their session and by `MARK` in their environment: a process that has left its
    parent, its session and its environment escapes.
    """
    import psutil

    current = psutil.Process()
    processes = set(current.children(recursive=True))
    if has_prctl():
        return processes
    session, mark = os.getsid(0), os.environ.get(MARK)
    for number in set(psutil.pids()) - {current.pid}:
        with contextlib.suppress(OSError, psutil.Error):  # those of other users
            process = psutil.Process(number)
            if os.getsid(number) == session or (mark and process.environ().get(MARK) == mark):
                processes.add(process)
    return processes


def end_descendants(child: int, status: int | None) -> int:
    """End all descendants of this process; return the wait status of `child`, known already or found."""
    import psutil

    def is_alive(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):  # a number that another process has by now included
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    while left := set(filter(is_alive, descendants())):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)
        status = reap().get(child, status)
    return reap().get(child, status) or 0
