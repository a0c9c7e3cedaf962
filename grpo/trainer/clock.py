"""The seconds of a step, by phase."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo.utils.device import wait_for

PHASES = ("data", "generate", "reward", "logprobs", "update")
"""Under which `metrics.jsonl` has the seconds of a step, as `time/PHASE`."""


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
        found = {phase: self._seconds[phase] for phase in PHASES}
        self.reset()
        return found
