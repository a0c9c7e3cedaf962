"""Memory use of a run: its peak in total and by phase."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from grpo.utils.device import forget_peaks, peaks
from grpo.utils.limits import GB

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
        for kept in (self.highest, self._since_log):
            for name, value in readings.items():
                kept[name] = max(value, kept.get(name, 0.0))

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
