"""The numbers above a run's page: where it stands, how it changed, its worst moment, and a curve."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean

from grpo.reporting.findings.base import values
from grpo.rundir.run_dir import Run

Points = list[tuple[int, float]]
POINTS = "{:.1f} points".format
CURVE = 40
"""Values of the curve in a tile."""


@dataclass(frozen=True)
class Tile:
    """A number, its change since the start, and its worst value with the step."""

    name: str
    value: float
    shown: str
    """The value as text, with its unit."""
    change: float | None
    """Difference to the start of the run."""
    changed: str
    """The change as text."""
    worst: float | None
    worst_step: int | None
    worst_shown: str
    note: str
    """Text below the change."""
    curve: list[float]
    """At most `CURVE` values from the start to now."""


def tiles_of(run: Run) -> list[Tile]:
    """Return the tiles of a run, without those of numbers that are not known."""
    speed = [(row["step"], row["step_time"]) for row in run.metrics if row.get("step_time")]
    memory = next((points for name in MEMORY if (points := values(run, name))), [])
    sampled = values(run, f"rewards/{run.grader}/mean")
    tiles: list[Tile | None] = [
        held_out(run),
        over_steps("sampled accuracy", sampled, "{:.1%}".format, LOWEST),
        over_steps("reward", values(run, "reward"), "{:.3g}".format, LOWEST),
        over_steps(
            "completion length", values(run, "completions/mean_length"), "{:,.1f} tokens".format, ("longest", max)
        ),
        over_steps("speed", speed, "{:.3g} s/step".format, ("slowest", max)),
        over_steps("memory", memory, "{:.2f} GiB".format, ("highest", max)),
    ]
    return [tile for tile in tiles if tile]


LOWEST = ("lowest", min)
MEMORY = ("memory/peak_reserved_gb", "memory/update_gb", "memory/host_gb")
"""Metrics of memory, the first that was logged is shown."""


def held_out(run: Run) -> Tile | None:
    """Return the tile of the accuracy on held-out problems, with the looks of the guard; None without an evaluation."""
    ends = [run.evaluation[when] for when in ("before", "after") if when in run.evaluation]
    if not ends:
        return None
    accuracies = [part["accuracy"] for part in ends]
    looks = [value for _, value in values(run, "guard/accuracy")]
    low, high = ends[-1]["interval"]
    first = f"{accuracies[0]:.1%} before; " if len(ends) > 1 else ""
    note = f"{first}95 % interval {low:.1%} to {high:.1%}, {ends[-1]['samples']} problems"
    change = accuracies[-1] - accuracies[0] if len(ends) > 1 else None
    changed = signed(100 * change, POINTS) if change is not None else ""
    curve = [accuracies[0], *looks, *accuracies[1:]]
    return Tile(
        "held-out accuracy", accuracies[-1], f"{accuracies[-1]:.1%}", change, changed, None, None, "", note, curve
    )


def over_steps(
    name: str, points: Points, show: Callable[[float], str], extreme: tuple[str, Callable[..., tuple[int, float]]]
) -> Tile | None:
    """Return the tile of a metric: the mean of the last tenth of the steps beside that of the first tenth.

    Args:
        points: (step, value) pairs.
        show: returns a value as text.
        extreme: a word for the worst value, and `min` or `max`.
    """
    if not points:
        return None
    size = max(1, len(points) // 10)
    first, last = (mean(value for _, value in part) for part in (points[:size], points[-size:]))
    word, worst = extreme
    step, value = worst(points, key=lambda point: point[1])
    change = last - first
    changed = signed(100 * change, POINTS) if show(0.0).endswith("%") else signed(change, show)
    note, curve = f"{word} {show(value)}, step {step}", stretches([value for _, value in points])
    return Tile(name, last, show(last), change, changed, value, step, show(value), note, curve)


def stretches(numbers: list[float]) -> list[float]:
    """Return the means of at most `CURVE` stretches of numbers."""
    bounds = [len(numbers) * place // CURVE for place in range(CURVE + 1)]
    return [mean(numbers[start:stop]) for start, stop in pairwise(bounds) if stop > start]


def signed(change: float, show: Callable[[float], str]) -> str:
    """Return a change as text with its sign, if it can be seen."""
    text = show(abs(change))
    return "no change" if text == show(0.0) else f"{'−' if change < 0 else '+'}{text}"
