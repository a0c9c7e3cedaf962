"""Values per token of the completions on a page; `grpo.trainer.update.token_values` says what they are."""

import math
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

VALUES = ("logp", "entropy", "advantage", "ratio", "correction", "clipped", "kind")
"""Columns with a value per token."""


def tokens_of(file: Path) -> dict[int, dict[str, Any]]:
    """Return the tokens of completions and their values by `completion_id`, given the file of the completions.

    A value that all tokens of a completion have stands there once, instead of a list. A file that is missing, or that a
    run was killed while it wrote, has none.
    """
    try:
        rows = parquet.read_table(file.with_name(file.name.replace("completions_", "tokens_"))).to_pylist()
    except (pyarrow.ArrowInvalid, OSError, UnicodeDecodeError):
        return {}
    return {row["completion_id"]: {"token": row["token"]} | values_of(row) for row in rows}


def values_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a completion, rounded to three digits."""
    by_name = {}
    for name in VALUES:
        values = [rounded(value) for value in row.get(name) or ()]
        if values:
            by_name[name] = values[0] if len(set(values)) == 1 else values
    return by_name


def rounded(value: Any) -> Any:
    """Return a number with three significant digits, None for one that is not finite, and anything else as it is."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.3g}") if math.isfinite(value) else None
