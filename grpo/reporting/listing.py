"""The runs in a directory as a table: status, accuracy, task, model and date of each."""

import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from grpo.rundir.files import RESOLVED_CONFIG, read_json
from grpo.rundir.lock import is_running
from grpo.utils.errors import ConfigError

COLUMNS = ("run", "status", "accuracy", "task", "model", "date")
"""Headings of the table, by which it is sorted and filtered."""
PLACES = ("*", "*/*", "*/*/*")
"""Places of runs in a directory: `outputs/<name>`, `outputs/<date>/<time>`, jobs of sweeps in `multirun`."""
MODEL = re.compile(r"^  model_name_or_path: (.+)$", re.MULTILINE)
"""The policy in a configuration, which is read as text: parsing takes a second per twenty runs."""
TASK = re.compile(r"^ +task: ([^\s\[]\S*)$", re.MULTILINE)
"""The choice of the task in Hydra's own configuration."""


def runs_in(folder: Path) -> list[Path]:
    """Return the directories of the runs in a directory that is neither a run nor a sweep."""
    files = (file for place in PLACES for file in folder.glob(f"{place}/summary.json"))
    return [file.parent for file in files if (file.parent / ".hydra").is_dir()]


def begun(run: Path) -> float:
    """Return when a run was started last, seconds since the epoch."""
    return (run / ".hydra").stat().st_mtime


def row_of(run: Path) -> dict[str, Any]:
    """Return the row of a run by heading; a run that runs no longer and has not said how it ended was killed."""
    summary = read_json(run / "summary.json")
    status = summary.get("status", "torn")
    model = first(MODEL, run / RESOLVED_CONFIG, run / ".hydra" / "config.yaml")
    return {
        "run": str(run),
        "status": "killed" if status == "running" and not is_running(run) else status,
        "accuracy": summary.get("accuracy_after"),
        "task": first(TASK, run / ".hydra" / "hydra.yaml") or str(summary.get("task") or ""),
        "model": Path(model.rstrip("}")).name if model.startswith(("/", ".", "$")) else model,
        "date": datetime.fromtimestamp(begun(run)).strftime("%Y-%m-%d %H:%M"),
    }


def first(pattern: re.Pattern[str], *files: Path) -> str:
    """Return what a pattern finds in the first of the files that has it; empty if none has."""
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    return next((match[1] for match in map(pattern.search, texts) if match), "")


def listed(folders: Sequence[Path], sort: str, filters: Sequence[str]) -> Table:
    """Return the table of the runs in directories.

    Args:
        folders: directories of runs.
        sort: a heading; accuracies and dates begin with the highest and the newest.
        filters: `heading=text`, of which a row has to contain all.

    Raises:
        ConfigError: a filter is malformed, or excludes all runs.
    """
    runs = [run for folder in folders for run in runs_in(folder)]
    rows = [row_of(run) for run in sorted(runs, key=begun, reverse=True)]
    for text in filters:
        heading, equals, wanted = text.partition("=")
        if not equals or heading not in COLUMNS:
            raise ConfigError(f"--filter={text}: write one of {', '.join(COLUMNS)}, and = with a part of its text")
        rows = [row for row in rows if wanted.casefold() in shown(row[heading]).casefold()]
    if not rows:
        raise ConfigError(f"there is no run with {' and '.join(filters)}")
    if sort == "accuracy":
        rows.sort(key=lambda row: -1.0 if row["accuracy"] is None else row["accuracy"], reverse=True)
    elif sort != "date":
        rows.sort(key=lambda row: str(row[sort]))
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold", min_width=max(len(row["run"]) for row in rows))
    for heading in COLUMNS[1:]:
        table.add_column(heading, overflow="fold", justify="right" if heading == "accuracy" else "left")
    for row in rows:
        table.add_row(*(shown(row[heading]) for heading in COLUMNS))
    return table


def shown(value: Any) -> str:
    """Return a cell as text without control characters."""
    if isinstance(value, float | int):
        return f"{value:.1%}"
    return "".join(sign if sign.isprintable() else " " for sign in value or "")
