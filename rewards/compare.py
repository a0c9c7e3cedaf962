"""What a changed reward makes of the completions of a run."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rewards.text import text_of

SHOWN = 10
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def compare_with_run(
    folder: Path, name: str, score: Callable[[list[dict[str, Any]], list[str]], list[float | None]], console: Console
) -> None:
    """Score the completions that a run has kept, and show those that are judged differently now.

    Args:
        folder: a run directory, with the Parquet files that TRL writes in `completions/`.
        name: the column of the run's own rewards.
        score: from rows and completions to rewards.

    Raises:
        ValueError: the run has kept no completions, or has no such reward.
    """
    tables = sorted((folder / "completions").glob("*.parquet"))
    if not tables:
        raise ValueError(
            f"{folder}: no completions in it (completions/*.parquet; train.log_completions=true keeps them)"
        )
    kept = pandas.concat([pandas.read_parquet(file) for file in tables], ignore_index=True)
    if name not in kept:
        raise ValueError(f"{folder}: its completions have no reward {name}; --name says which of: {', '.join(kept)}")
    rows = kept.to_dict("records")
    texts = [
        text_of(row["completion"] if isinstance(row["completion"], str) else list(row["completion"])) for row in rows
    ]
    before = [None if value != value else float(value) for value in kept[name]]
    after = score([{key: value for key, value in row.items() if key != "completion"} for row in rows], texts)
    changed = [row for row, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    table = Table(
        "step", "completion", name, "now", title=f"{len(changed)} of {len(rows)} completions are judged otherwise"
    )
    for row in changed[:SHOWN]:
        said = escape(CONTROL.sub(" ", " ".join(texts[row][-200:].split())))
        table.add_row(str(rows[row]["step"]), said, str(before[row]), str(after[row]))
    console.print(table)
    if len(changed) > SHOWN:
        console.print(f"and {len(changed) - SHOWN} more")
