"""A finding, and the statistics over windows of steps that rules use, as single steps are noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from grpo.rundir.run_dir import Run

MIN_STEPS = 10
"""Logged steps that a rule about a trend needs."""


@dataclass(frozen=True)
class Finding:
    """A problem of a run, with numbers that show it and changes that may help."""

    name: str
    """Identifier, such as `reward_flat`."""
    title: str
    """The problem in one sentence."""
    evidence: str
    """Numbers that show the problem."""
    advice: str
    """Changes that may help."""


def values(run: Run, name: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of a metric; of rewards, over all completions, also those not trained on."""
    everything = f"rollout/{name}"
    pairs = [(row["step"], row.get(everything, row.get(name))) for row in run.metrics]
    return [(step, value) for step, value in pairs if value is not None]


def tools_of(run: Run) -> list[str]:
    """Return the names of the tools whose calls were counted."""
    return sorted({key.split("/")[1] for row in run.metrics for key in row if key.endswith("/calls")})


def ends(run: Run, name: str, fraction: float = 0.25) -> tuple[list[float], list[float]] | None:
    """Return the values of a metric in the first and in the last `fraction` of a run; None if there are too few."""
    series = [value for _, value in values(run, name)]
    size = int(fraction * len(series))
    return (series[:size], series[-size:]) if len(series) >= MIN_STEPS and size >= 2 else None


def often(run: Run, name: str) -> tuple[float, float] | None:
    """Return the means of a metric in the first and last quarter of a run; None if the last is 10 % or less."""
    quarters = ends(run, name)
    return (mean(quarters[0]), mean(quarters[1])) if quarters and mean(quarters[1]) > 0.1 else None


def rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the difference of the means of two samples, after minus before, and its standard error."""
    error = (stdev(before) ** 2 / len(before) + stdev(after) ** 2 / len(after)) ** 0.5
    return mean(after) - mean(before), error
