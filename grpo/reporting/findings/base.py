"""A finding, and the means over windows of steps that findings come from: single steps are noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from grpo.runs.run_dir import Run

FEWEST = 10
"""Steps that a rule about a trend needs at least."""


@dataclass(frozen=True)
class Finding:
    """Something that a reader of a run should know."""

    name: str
    title: str
    evidence: str
    advice: str


def values(run: Run, name: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric, where it was logged."""
    return [(row["step"], row[name]) for row in run.metrics if row.get(name) is not None]


def ends(run: Run, name: str, share: float = 0.25) -> tuple[list[float], list[float]] | None:
    """Return the values of a metric in the first and the last part of a run; None if there are too few."""
    found = [value for _, value in values(run, name)]
    size = int(share * len(found))
    return (found[:size], found[-size:]) if len(found) >= FEWEST and size >= 2 else None


def rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return by how much the mean has risen from one sample to another, and the standard error of that."""
    error = (stdev(before) ** 2 / len(before) + stdev(after) ** 2 / len(after)) ** 0.5
    return mean(after) - mean(before), error
