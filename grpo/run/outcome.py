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
from typing import TYPE_CHECKING, Any

from grpo.run.live_page import LivePage
from grpo.rundir.files import read_json, write_json
from grpo.rundir.storage import storage_fault
from grpo.rundir.versions import git_commit, versions
from grpo.trainer.measurements import MemoryReadings
from grpo.utils.distributed import LOST, LOST_STATUS, first_failure, is_loss, is_main_process, log_name, world_size
from grpo.utils.errors import ConfigError, DirectoryLost, DoesNotFit, GenerationError, RunError, described
from grpo.utils.spoken import shown
from rewards.isolation.reward import RewardError

if TYPE_CHECKING:
    from grpo.planning.fit import Plan

log = logging.getLogger(__name__)
NAMED_FAILURES = (DoesNotFit, GenerationError, RewardError)
"""Failures whose message says everything without the name of the exception."""
STUCK = 15.0
"""Seconds in which a process gives way to the failure of another after SIGTERM; its launcher kills it after 30."""


@contextmanager
def ends_when_stuck(run_dir: Path, page: LivePage) -> Iterator[None]:
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
                    write_outcome(read_json(run_dir / "summary.json") | reason, run_dir, page)
                    os._exit(LOST_STATUS)

    threading.Thread(target=watch, daemon=True).start()
    before = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        wakeup.close()  # which ends the thread


def reason_of(error: Exception | SystemExit, run_dir: Path) -> str:
    """Return why a run broke, in one line: for the process that has failed first."""
    if elsewhere := first_failure():
        return elsewhere.removeprefix("failed: ")
    if is_loss(error):
        return LOST
    kind = "" if isinstance(error, NAMED_FAILURES) else f"{type(error).__name__}: "
    line = f"{kind}{error}".splitlines()[0] if str(error).strip() else described(error)
    return storage_fault(error, run_dir) or line


class Outcome:
    """Writes `summary.json` and the page: facts as they become known, and how the run ended.

    A context: `running` while inside, then `completed`, `stopped` or `failed`. Ctrl-C and signals end it without an
    exception; any other is reported in one line.

    Args:
        run_dir: of the run.
        plan: of it; None if it could not be planned.
        memory: the readings of this process.
        page: written while the run runs; its process ends before the page is written for the last time.

    Raises:
        ConfigError: the input was wrong.
        RunError: the run broke, here or on the process that has failed first; the log has the traceback.
    """

    def __init__(self, run_dir: Path, plan: "Plan | None", memory: MemoryReadings, page: LivePage) -> None:
        self.run_dir, self.plan, self.memory, self.page = run_dir, plan, memory, page
        self.started = time.monotonic()
        self.summary: dict[str, Any] = {"status": "failed", "reason": None}

    def add(self, **facts: Any) -> None:
        """Add facts to the summary."""
        self.summary |= facts

    def __enter__(self) -> "Outcome":
        return self

    def begin(self) -> None:
        """Write that the run is running: inside the context, as a signal may come before the file is on the disk."""
        if is_main_process():
            write_json(self.run_dir / "summary.json", {"status": "running", "reason": None})

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, DirectoryLost):  # there, another run may be
            self.page.end()
            return False
        told = self._ending(error)
        self.memory.note()
        self.add(wall_time_s=round(time.monotonic() - self.started, 1), **self.memory.highest)
        self.add(planned_gb=self.plan.expected() if self.plan else None, versions=versions(), git_commit=git_commit())
        write_outcome(self.summary, self.run_dir, self.page)
        if told:
            raise told from error
        return isinstance(error, KeyboardInterrupt)

    def _ending(self, error: BaseException | None) -> RunError | None:
        """Add status and reason where an exception ends the run; return what the user reads instead of it."""
        if isinstance(error, ConfigError):
            log.error("invalid input", exc_info=error)
            self.add(status="failed", reason=str(error))
        elif isinstance(error, KeyboardInterrupt):
            if elsewhere := first_failure():  # its launcher stops this process for it
                self.add(status="failed", reason=elsewhere.removeprefix("failed: "))
                return RunError(elsewhere, LOST_STATUS)
            self.add(status="stopped", reason=str(error) or "interrupted")
        elif isinstance(error, Exception | SystemExit):
            log.error("the run failed", exc_info=error)
            self.add(status="failed", reason=reason_of(error, self.run_dir))
            file = self.run_dir / log_name()
            where = f"; the traceback is in {shown(file)}" if self.run_dir.is_dir() else ""
            ended_for_another = first_failure() or is_loss(error)
            return RunError(f"failed: {self.summary['reason']}{where}", LOST_STATUS if ended_for_another else 1)
        return None


def write_outcome(summary: dict[str, Any], run_dir: Path, page: LivePage) -> None:
    """Write `summary.json` and the page, which nothing else writes any more.

    Raises:
        RunError: `summary.json` cannot be written, and it is not known yet that the run has failed.
    """
    if not is_main_process():
        return
    page.end()
    try:
        write_json(run_dir / "summary.json", summary)
        (run_dir / "README.md").unlink(missing_ok=True)  # TRL's empty model card; `grpo.export` writes one
    except OSError as error:
        if summary["status"] != "failed":
            raise RunError(f"failed: {reason_of(error, run_dir)}") from error
        log.exception("no summary could be written")
        return
    try:
        from grpo.reporting.page import write_report  # with libraries that no step needs

        write_report(run_dir)
    except Exception:  # the run is what counts
        log.exception("no page could be written")
