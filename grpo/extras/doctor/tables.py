"""Readers of completions: tables of TRL and of this project, `completions.jsonl` of ms-swift, rollouts of verl."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from grpo.extras.doctor.history import Completion, Row, number, text_of
from grpo.extras.doctor.metrics import json_lines
from grpo.reporting.completions import files_of, read_rows

OTHERS = {"prompt": "input", "completion": "output", "advantage": "advantages"}
"""Columns of verl and ms-swift by TRL's."""
NOT_REWARDS = {"step", "advantage", "advantages", "entropy", "completion_tokens", "truncated", "completion_id"}
"""Columns of numbers that are no rewards."""
ROLLOUTS = re.compile(r"\d+\.jsonl")
"""A file of verl's `rollout_data_dir`, whose name is the step."""
MOST = 200
"""Files of completions that are read, spread over the run."""


def completions_of(folder: Path, rewards: Sequence[str]) -> tuple[list[Completion], list[str]]:
    """Return the completions in a folder of a run, and notes about files that were skipped.

    Args:
        folder: with completions_*.parquet, completions.jsonl or rollouts of verl (12.jsonl), in it or below.
        rewards: names of the reward functions in the metrics; none if these are not logged.
    """
    notes, completions = list[str](), list[Completion]()
    files = [file for place in (folder, folder / "completions") for file in files_of(place)]
    files += folder.glob("completions.jsonl")
    rollouts = [*folder.glob("[0-9]*.jsonl"), *folder.glob("*/[0-9]*.jsonl")]
    files += sorted((file for file in rollouts if ROLLOUTS.fullmatch(file.name)), key=lambda file: int(file.stem))
    if len(files) > MOST:
        notes.append(f"{MOST} of {len(files)} files of completions were read, spread over the run")
        files = [files[round(place * (len(files) - 1) / (MOST - 1))] for place in range(MOST)]
    for file in files:
        read = completions_in(file, rewards)
        if not read:
            notes.append(f"skipped: {file} is torn, or holds no completions")
        completions += read
    return completions, notes


def completions_in(file: Path, rewards: Sequence[str]) -> list[Completion]:
    """Return the completions in a file, none if it is torn or of something else.

    Without names in the metrics, all columns of numbers are rewards.
    """
    rows, numbers = from_parquet(file) if file.suffix == ".parquet" else from_lines(file)
    names = [name for name in rewards if any(name in row for row in rows)]
    names = names or [name for name in numbers if name not in NOT_REWARDS]
    return [completion for row in rows if (completion := completion_of(row, names))]


def from_parquet(file: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a Parquet table and its columns of numbers; none if it is torn."""
    try:
        schema = parquet.read_schema(file)
    except (pyarrow.ArrowInvalid, OSError):
        return [], []
    kinds = (pyarrow.types.is_floating, pyarrow.types.is_integer)
    return read_rows(file, schema.names), [field.name for field in schema if any(kind(field.type) for kind in kinds)]


def from_lines(file: Path) -> tuple[list[Row], list[str]]:
    """Return rows of JSON lines and their columns of numbers; ms-swift writes a table of lists per line."""
    rows = list[Row]()
    for line in json_lines(file):
        columns = {name: cells for name, cells in line.items() if isinstance(cells, list)}
        if {"completion", "step"} <= columns.keys():
            rows += [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=False)]
        else:
            rows.append(line)
    cells_of: dict[str, list] = {}
    for row in rows:
        for name, cell in row.items():
            cells_of.setdefault(name, []).extend([] if cell is None else [cell])
    return rows, [name for name, cells in cells_of.items() if cells and all(map(is_number, cells))]


def completion_of(row: Row, rewards: Sequence[str]) -> Completion | None:
    """Return a row of a table as a completion; None for a row of something else."""
    prompt, text, advantage = (row.get(name, row.get(other)) for name, other in OTHERS.items())
    step = number(row.get("step"))
    if prompt is None or text is None or step is None:
        return None
    values = {name: finite(row.get(name)) for name in rewards}
    return Completion(int(step), text_of(prompt), text_of(text), values, finite(advantage))


def is_number(cell: object) -> bool:
    """Return whether a cell is a number, as a reward is, and not a text of digits, as an answer may be."""
    return isinstance(cell, int | float) and not isinstance(cell, bool)


def finite(cell: object) -> float | None:
    """Return the number in a cell; None if there is none, or it is not finite."""
    value = number(cell)
    return value if value is not None and math.isfinite(value) else None
