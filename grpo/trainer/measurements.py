"""Measurements of a run: peak memory in total and by phase, and the seconds of each phase of a step."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from grpo.utils.device import forget_peaks, peaks, wait_for
from grpo.utils.limits import GB

PHASES = ("data", "generate", "reward", "logprobs", "update")
"""Under which `metrics.jsonl` has the seconds of a step, as `time/PHASE`."""
AWAKE = ("generate", "evaluate")
"""Phases in which an engine that sleeps otherwise is awake."""


class MemoryReadings:
    """The highest memory use of this process in GiB, under the names of `metrics.jsonl`.

    A phase's reading is of the GPU as PyTorch has allocated it, or of the process where it uses none.

    Args:
        on_gpu: whether this process trains on a GPU; there may be one that it does not use.
    """

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.highest: dict[str, float] = {}
        self._since_log: dict[str, float] = {}
        self._phases: list[str] = []
        self._changed = time.monotonic()
        self.asleep: Callable[[], int] = lambda: 0
        """Bytes that PyTorch counts as allocated and a sleeping engine has freed."""

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Read the peak inside the context, without that of phases within it."""
        self.note()
        self._phases.append(phase)
        try:
            yield
        finally:
            self.note()
            self._phases.pop()

    @property
    def phase(self) -> tuple[str, float]:
        """The phase at hand and when it or its last change began, by `time.monotonic`."""
        return (self._phases or ["between phases"])[-1], self._changed

    def note(self) -> None:
        """Read the peak since the last call, and reset it."""
        self._changed = time.monotonic()
        readings = self.read()
        if self._phases:
            device = readings.get("memory/peak_allocated_gb", readings["memory/host_gb"])
            readings[f"memory/{self._phases[-1]}_gb"] = device
        for highest in (self.highest, self._since_log):
            for name, value in readings.items():
                highest[name] = max(value, highest.get(name, 0.0))

    def read(self) -> dict[str, float]:
        """Return the peaks since the last call, GiB, and reset them."""
        readings = {"memory/host_gb": host_peak() / GB}
        if self.on_gpu:
            asleep = self.asleep() if set(self._phases).isdisjoint(AWAKE) else 0
            for name, peak in zip(("allocated", "reserved"), peaks(), strict=True):
                readings[f"memory/peak_{name}_gb"] = (peak - asleep) / GB
            forget_peaks()
        with contextlib.suppress(OSError):  # Linux only; see proc_pid_clear_refs(5)
            Path("/proc/self/clear_refs").write_text("5")
        return readings

    def since_log(self) -> dict[str, float]:
        """Return the highest readings since the last call."""
        self.note()
        readings, self._since_log = self._since_log, {}
        return readings


def host_peak() -> int:
    """Return the bytes of host memory that this process had at the most since the last reset.

    Only Linux knows the most; elsewhere it is what the process has now.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


class StepClock:
    """Adds up the seconds of phases, those of the work that a GPU has been given included.

    Args:
        device: on which this process trains.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, phase: str, counts: bool = True) -> Iterator[None]:
        """Add the time inside the context to a phase; not in an evaluation, where it does not count."""
        started = time.perf_counter()
        yield
        if counts:
            self.wait()
            self._seconds[phase] += time.perf_counter() - started

    def wait(self) -> None:
        """Wait for the GPU, whose work would otherwise be counted in the phase that needs its results."""
        wait_for(self.device)

    def reset(self) -> None:
        """Begin at zero."""
        self._seconds.clear()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call; `update` is the part of `step` that is no `rollout`."""
        self._seconds["update"] = self._seconds["step"] - self._seconds["rollout"]
        seconds = {phase: self._seconds[phase] for phase in PHASES}
        self.reset()
        return seconds
