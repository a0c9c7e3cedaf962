"""Each case in a process of its own, forked from a process with libraries loaded: an OOM ends one case only."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from grpo.extras.measuring.cases import Case
from grpo.utils.errors import DoesNotFit

PRELOADED = ["datasets", "transformers.models.auto.modeling_auto", "grpo.extras.measuring.cases"]
"""Not PEFT and what imports it: with it comes bitsandbytes, which initializes CUDA, and then no fork can use it."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(PRELOADED)


def in_process(case: Case, device: str, seconds: float) -> tuple[dict[str, Any] | None, str]:
    """Run a case in a process of its own.

    Returns its `outcome` with the measured numbers, and the traceback of an error; None if it was not done in time.
    """
    try:
        return sent_by(report, case, device, seconds=seconds) or (None, f"not done after {seconds:.0f} s")
    except ChildProcessError as error:  # ended by the system
        return {"outcome": "failed", "error": str(error)}, ""


def sent_by(function: Callable[..., None], *arguments: Any, seconds: float) -> Any:
    """Return what a function sends from a process of its own, None if it has sent nothing in time.

    Args:
        function: gets the arguments and the connection to send by.
        arguments: of the function.
        seconds: after which the process is ended.

    Raises:
        ChildProcessError: the process has ended without sending; the text has its exit status.
    """
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=function, args=(*arguments, sender))
    with silent():  # the libraries' warnings
        process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(max(0.0, seconds)) else None
    except EOFError:
        process.join()
        raise ChildProcessError(f"exit status {process.exitcode}") from None
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
    from grpo.extras.measuring.training import measure
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
    copies, nothing = {stream: os.dup(stream) for stream in (1, 2)}, os.open(os.devnull, os.O_WRONLY)
    for stream in copies:
        os.dup2(nothing, stream)
    os.close(nothing)
    try:
        yield
    finally:
        for stream, copy in copies.items():
            os.dup2(copy, stream)
            os.close(copy)
