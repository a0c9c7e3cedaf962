"""The page of a run while it runs: rank 0 has it written by a process of its own, `grpo.run.page_process`."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerState

from grpo.utils.distributed import log_name

log = logging.getLogger(__name__)
EVERY = 30.0
"""Seconds between two pages at least, and from the beginning of the training to the first one."""
PORTION = 0.01
"""Fraction of the time of one core that the pages may take: later ones come more seldom where they take more."""
END_LIMIT = 5.0
"""Seconds in which the process ends after SIGTERM; SIGKILL follows."""


class LivePage(TrainerCallback):
    """Starts the process with the first row of metrics after `EVERY` seconds: a short run has none.

    It costs this process its start, and whatever happens to it costs a line in the log.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.begun: float | None = None
        """When the training began, by `time.monotonic`; None before, and where no process is to be started any more."""
        self.process: subprocess.Popen | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.begun = time.monotonic()

    def on_log(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.begun is not None and time.monotonic() - self.begun >= EVERY:
            self.begun = None
            try:
                self.process = start(self.run_dir)
            except OSError as error:
                log.warning("the page is not written while the run runs: %s", error)

    def end(self) -> None:
        """End the process, and wait until it has ended: it must not write over the last page of the run."""
        self.begun, process = None, self.process
        if process is None:
            return
        self.process = None
        if (status := process.poll()) is not None and status < 0:  # else it has said so itself
            log.warning("the process that writes the page was killed by signal %d", -status)
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            for partial in self.run_dir.glob("report.*.partial-*"):
                partial.unlink(missing_ok=True)


def start(run_dir: Path) -> subprocess.Popen:
    """Start the process, whose warning goes to the log of the run.

    It stays in the session of this process, as the scheduler shares cores between sessions first (`sched_autogroup`),
    and has a group of its own, which Ctrl-C does not reach.
    """
    arguments = (run_dir, os.getpid(), EVERY, PORTION)
    line = [sys.executable, "-W", "ignore", "-m", "grpo.run.page_process", *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": "1",  # of the libraries that read completions
    }
    with (run_dir / log_name()).open("a") as file:
        return subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, env=environment, process_group=0
        )
