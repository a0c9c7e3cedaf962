"""Each case in a process of its own, forked from a process with the libraries loaded: an OOM ends one case only."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from grpo.measuring.cases import Case
from grpo.utils.errors import DoesNotFit

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["grpo.measuring.training"])


def in_process(case: Case, device: str, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Run a case in a process of its own.

    Returns its `outcome` with the measured numbers, and the traceback of an error; None if it was not done in time.
    """
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=report, args=(case, device, sender))
    with silent():  # the libraries' warnings
        process.start()
    sender.close()
    try:
        if not receiver.poll(max(0.0, seconds)):
            return None, f"not done after {seconds:.0f} s"
        return receiver.recv()
    except EOFError:  # ended by the system
        process.join()
        return {"outcome": "failed", "error": f"exit status {process.exitcode}"}, ""
    finally:
        process.kill()
        process.join()


def report(case: Case, device: str, sender: Connection) -> None:
    """Measure a case, and send the outcome instead of printing; an error is recorded by its type alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the command, which ends this process
    with silent():
        sender.send(outcome_of(case, device))


def outcome_of(case: Case, device: str) -> tuple[dict[str, Any], str]:
    """Return the outcome of a case, and the traceback of an error."""
    from grpo.measuring.training import measure
    from grpo.utils.oom import is_out_of_memory

    try:
        return {"outcome": "measured", **measure(case, device)}, ""
    except Exception as error:
        if isinstance(error, DoesNotFit) or is_out_of_memory(error):
            return {"outcome": "out of memory"}, ""
        return {"outcome": "failed", "error": type(error).__name__}, traceback.format_exc()


@contextmanager
def silent() -> Iterator[None]:
    """While inside, this process and those that it starts print nothing."""
    kept, nothing = {stream: os.dup(stream) for stream in (1, 2)}, os.open(os.devnull, os.O_WRONLY)
    for stream in kept:
        os.dup2(nothing, stream)
    os.close(nothing)
    try:
        yield
    finally:
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)
