"""A thread beside a run: how busy the GPU is, and whether the run still makes progress."""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerState

from grpo.trainer.measurements import MemoryReadings
from grpo.utils.distributed import own_name

log = logging.getLogger(__name__)
SECOND = 1.0
STALLED = 20 * 60.0
"""Seconds in one phase after which a run is reported, unless an earlier one took longer."""
LONGER = 5.0
"""Times the longest completed phase that the next one may take without a report."""


class Monitor(TrainerCallback):
    """Reports a phase that does not end, with the stack of every thread, and logs `gpu/utilization`.

    A phase is a generation, a scoring or an update; each of an evaluation's batches is one too. Nothing is stopped: a
    long generation looks like a hung one.

    Args:
        memory: knows the phase at hand and when it began.
        utilization: returns the percentage of the last second in which the GPU computed, None if the driver cannot say;
            None for a run without a GPU.
        folder: gets `stacks.txt`.
    """

    def __init__(
        self,
        memory: MemoryReadings,
        utilization: Callable[[], float | None] | None,
        folder: Path,
        console: Console,
    ) -> None:
        self.memory, self.utilization, self.folder, self.console = memory, utilization, folder, console
        self.percentages: list[float] = []
        self.longest = 0.0
        self.seen = memory.phase
        self.reported: float | None = None
        self.ended = threading.Event()

    def __enter__(self) -> "Monitor":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()

    def _watch(self) -> None:
        while not self.ended.wait(SECOND):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Take a reading of the GPU, and report the phase at hand if it has lasted too long."""
        percentage = self.utilization() if self.utilization else None
        if percentage is not None:
            self.percentages.append(percentage)
        name, began = self.memory.phase
        if began != self.seen[1]:
            self.longest = max(self.longest, began - self.seen[1])
            self.seen = (name, began)
        if began != self.reported and now - began > max(STALLED, LONGER * self.longest):
            self.reported = began
            stacks = self.folder / own_name("stacks.txt")
            with stacks.open("a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
            text = (
                f"no progress for {(now - began) / 60:.0f} minutes, in the phase {name}; the stacks of all threads are "
                f"in {stacks}"
            )
            log.warning("%s", text)
            self.console.print(text, style="yellow", soft_wrap=True)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the mean utilization since the last log to `logs`, which later callbacks write down."""
        percentages, self.percentages = self.percentages, []
        if logs is not None and percentages:
            logs["gpu/utilization"] = mean(percentages) / 100
