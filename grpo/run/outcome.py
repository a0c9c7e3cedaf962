"""How a run ended: the reason in one line, `summary.json` and the page."""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.rundir.files import read_json, write_json
from grpo.rundir.storage import storage_fault
from grpo.utils.distributed import LOST, first_failure, is_loss, is_main_process, world_size
from grpo.utils.errors import DoesNotFit, GenerationError, RunError
from rewards.isolation.reward import RewardError

log = logging.getLogger(__name__)
NAMED_FAILURES = (DoesNotFit, GenerationError, RewardError)
"""Failures whose message says everything without the name of the exception."""
STUCK = 15.0
"""Seconds in which a process gives way to the failure of another after SIGTERM; its launcher kills it after 30."""


@contextmanager
def ends_when_stuck(run_dir: Path) -> Iterator[None]:
    """End this process if another one has failed, its launcher has sent SIGTERM, and no handler in Python can run.

    They do not while the main thread waits in C++, as in a collective operation of NCCL for the process that has
    failed. The number of a signal comes through the wakeup file at once.
    """
    if world_size() == 1:
        yield
        return
    signals, wakeup = socket.socketpair()
    wakeup.setblocking(False)

    def watch() -> None:
        while received := signals.recv(64):
            if signal.SIGTERM in received:
                time.sleep(STUCK)
                if elsewhere := first_failure():
                    log.error("stuck %.0f s after another process had failed: %s", STUCK, elsewhere)
                    reason = {"status": "failed", "reason": elsewhere.removeprefix("failed: ")}
                    write_outcome(read_json(run_dir / "summary.json") | reason, run_dir)
                    os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakeup.close()  # which ends the thread


def give_way(summary: dict[str, Any]) -> None:
    """Note why another process has failed, if one has: its launcher stops this one for it.

    Raises:
        RunError: one has.
    """
    if elsewhere := first_failure():
        summary.update(status="failed", reason=elsewhere.removeprefix("failed: "))
        raise RunError(elsewhere)


def reason_of(error: Exception, run_dir: Path) -> str:
    """Return why a run broke, in one line: for the process that has failed first."""
    if elsewhere := first_failure():
        return elsewhere.removeprefix("failed: ")
    if is_loss(error):
        return LOST
    kind = "" if isinstance(error, NAMED_FAILURES) else f"{type(error).__name__}: "
    return storage_fault(error, run_dir) or f"{kind}{error}".splitlines()[0]


def write_outcome(summary: dict[str, Any], run_dir: Path) -> None:
    """Write `summary.json` and the page.

    Raises:
        RunError: `summary.json` cannot be written, and it is not known yet that the run has failed.
    """
    if not is_main_process():
        return
    try:
        write_json(run_dir / "summary.json", summary)
        (run_dir / "README.md").unlink(missing_ok=True)  # TRL's empty model card; `grpo.export` writes one
    except OSError as error:
        if summary["status"] != "failed":
            raise RunError(f"failed: {reason_of(error, run_dir)}") from error
        log.exception("no summary could be written")
        return
    try:
        from grpo.reporting.page import write_report  # with matplotlib, which no step needs

        write_report(run_dir)
    except Exception:  # the run is what counts
        log.exception("no page could be written")
