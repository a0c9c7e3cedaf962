"""Each case in a process of its own, forked from a process with the libraries loaded: an OOM ends one case only."""

import multiprocessing
import os
import signal
import traceback
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
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    from grpo.measuring.training import measure
    from grpo.utils.oom import is_out_of_memory

    try:
        sender.send(({"outcome": "measured", **measure(case, device)}, ""))
    except Exception as error:
        lacking = isinstance(error, DoesNotFit) or is_out_of_memory(error)
        outcome = {"outcome": "out of memory"} if lacking else {"outcome": "failed", "error": type(error).__name__}
        sender.send((outcome, "" if lacking else traceback.format_exc()))
