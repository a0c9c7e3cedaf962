"""The numbers above a run's page: where it stands, how it changed, and its worst moment."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from grpo.reporting.findings.base import values
from grpo.rundir.run_dir import Run

Points = list[tuple[int, float]]


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


def tiles_of(run: Run) -> list[Tile]:
    """Return the tiles of a run, without those of numbers that are not known."""
    speed = [(row["step"], row["step_time"]) for row in run.metrics if row.get("step_time")]
    memory = next((points for name in MEMORY if (points := values(run, name))), [])
    tiles: list[Tile | None] = [
        accuracy(run),
        over_steps("reward", values(run, "reward"), "{:.3g}".format, min),
        over_steps("completion length", values(run, "completions/mean_length"), "{:,.1f} tokens".format, max),
        over_steps("speed", speed, "{:.3g} s/step".format, max),
        over_steps("memory", memory, "{:.2f} GiB".format, max),
    ]
    return [tile for tile in tiles if tile]


MEMORY = ("memory/peak_reserved_gb", "memory/update_gb", "memory/host_gb")
"""Metrics of memory, the first that was logged is shown."""


def accuracy(run: Run) -> Tile | None:
    """Return the tile of the held-out accuracy, or of the sampled one while there is none."""
    sampled = values(run, f"rewards/{run.grader}/mean")
    over = over_steps("accuracy", sampled, "{:.1%}".format, min)
    ends = [run.evaluation[when]["accuracy"] for when in ("before", "after") if when in run.evaluation]
    if len(ends) < 2:
        return over
    worst = (over.worst, over.worst_step, f"{over.worst_shown} as sampled") if over else (None, None, "")
    change = ends[1] - ends[0]
    return Tile("accuracy", ends[1], f"{ends[1]:.1%}", change, signed(100 * change, "{:.1f} points".format), *worst)


def over_steps(
    name: str, points: Points, show: Callable[[float], str], worst: Callable[..., tuple[int, float]]
) -> Tile | None:
    """Return the tile of a metric: the mean of the last tenth of the steps beside that of the first tenth.

    Args:
        points: (step, value) pairs.
        show: returns a value as text.
        worst: `min` or `max`.
    """
    if not points:
        return None
    size = max(1, len(points) // 10)
    first, last = (mean(value for _, value in part) for part in (points[:size], points[-size:]))
    step, value = worst(points, key=lambda point: point[1])
    change = last - first
    return Tile(name, last, show(last), change, signed(change, show), value, step, show(value))


def signed(change: float, show: Callable[[float], str]) -> str:
    """Return a change as text with its sign."""
    return f"{'−' if change < 0 else '+'}{show(abs(change))}"
