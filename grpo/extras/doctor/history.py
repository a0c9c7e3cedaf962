"""A run as its logs show it, whichever trainer wrote them: steps under TRL's names, and completions."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Row = dict[str, Any]
HUGE = 1e100
"""Size beyond which a number counts as infinite."""


@dataclass(frozen=True)
class Completion:
    """A row of a table of completions."""

    step: int
    prompt: str
    text: str
    rewards: dict[str, float | None]
    """Value by the name of a reward function; None where it gave none, or NaN."""
    advantage: float | None = None


Group = list[Completion]
"""Completions of a prompt in a step."""


@dataclass
class History:
    """Steps and completions of a run."""

    source: str
    """Format and file, such as `TRL, trainer_state.json`."""
    folder: Path
    """Folder of the logs."""
    steps: list[Row] = field(default_factory=list)
    """Metrics of each logged step under TRL's names, `step` among them; a value may be NaN, or None."""
    completions: list[Completion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines about files that were skipped, and values that the format rounds away."""

    def values(self, name: str) -> list[tuple[int, float]]:
        """Return the (step, value) pairs of a metric, without missing and non-finite values."""
        pairs = [(row["step"], row.get(name)) for row in self.steps]
        return [(step, value) for step, value in pairs if value is not None and math.isfinite(value)]

    @property
    def rewards(self) -> list[str]:
        """Names of the reward functions, of the metrics or else of the completions."""
        names = {key.split("/")[1] for row in self.steps for key in row if is_reward(key)}
        return sorted(names or {name for completion in self.completions for name in completion.rewards})

    @property
    def groups(self) -> list[Group]:
        """Groups of two completions or more, by step."""
        ordered = sorted(self.completions, key=lambda row: (row.step, row.prompt))
        groups = [list(rows) for _, rows in groupby(ordered, key=lambda row: (row.step, row.prompt))]
        return [group for group in groups if len(group) > 1]

    def of_completions(self) -> list[Row]:
        """Return steps with the metrics that tables of completions have; the reward, if there is a single function."""
        rows = list[Row]()
        for step, group in groupby(sorted(self.completions, key=lambda row: row.step), key=lambda row: row.step):
            table, row = list(group), Row(step=step)
            for name in table[0].rewards:
                values = [value for entry in table if (value := entry.rewards.get(name)) is not None]
                row[f"rewards/{name}/mean"] = fmean(values) if values else None
                row[f"rewards/{name}/std"] = stdev(values) if len(values) > 1 else None
            if len(table[0].rewards) == 1:
                row |= {"reward": row[f"rewards/{name}/mean"], "reward_std": row[f"rewards/{name}/std"]}
            rows.append(row)
        return rows


def is_reward(name: str) -> bool:
    """Return whether a metric is the mean of a reward function."""
    return name.startswith("rewards/") and name.endswith("/mean") and name.count("/") == 2


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return a row per step in the order of the steps; of a value that is logged twice, the later."""
    by_step: dict[int, Row] = {}
    for row in rows:
        by_step.setdefault(row["step"], {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def without_repeats(completions: list[Completion]) -> list[Completion]:
    """Return completions without the steps whose tables repeat the step before, as of several updates per rollout."""
    different, previous = list[Completion](), list[tuple]()
    for _, group in groupby(sorted(completions, key=lambda row: row.step), key=lambda row: row.step):
        table = list(group)
        content = [(row.prompt, row.text, row.rewards) for row in table]
        if content != previous:
            different += table
        previous = content
    return different


def number(value: Any) -> float | None:
    """Return a number as a log has it, also as text or as NumPy prints it; None for anything else.

    A number beyond `HUGE` counts as infinite: squares of all others are finite.
    """
    if isinstance(value, str):
        value = value.strip().removeprefix("np.float64(").removeprefix("np.float32(").removesuffix(")")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        parsed = float(value)
    except (ValueError, OverflowError):
        return None
    return math.copysign(math.inf, parsed) if abs(parsed) > HUGE else parsed


def text_of(value: Any) -> str:
    """Return a prompt or a completion as text: of messages, the contents of all."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        contents = [turn.get("content") if isinstance(turn, dict) else turn for turn in value]
        return "\n".join(text if isinstance(text, str) else json.dumps(text, default=str) for text in contents)
    return value if isinstance(value, str) else str(value)
