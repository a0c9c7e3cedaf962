"""The completions of a run that its page shows: of steps spread over the run, as many as a page can hold."""

import json
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
from markupsafe import Markup
from pyarrow import parquet

STEPS = 60
"""Steps that are shown at most."""
LENGTH = 6000
"""Characters of a text that are shown; of a longer one beginning and end."""
SIZE = 2_500_000
"""Bytes of text on a page at most."""


def sample(run_dir: Path, weights: dict[str, float]) -> dict[str, Any]:
    """Return `steps`, each with the groups of its completions, and `shown` of `logged` steps.

    A group has its prompt and completions, the highest reward first, each with text, reward, advantage and what each
    reward function gave. Where all groups of a step are too much, its first ones come, at least one, of which the best
    and the worst completion.

    Args:
        weights: of the reward functions, by name.
    """
    files = sorted(
        (run_dir / "completions").glob("completions_*.parquet"), key=lambda file: (len(file.name), file.name)
    )
    count = min(STEPS, len(files))
    chosen = [files[round(place * (len(files) - 1) / max(1, count - 1))] for place in range(count)]
    steps = []
    for file in chosen:
        try:
            rows = read_rows(file, [*KEPT, *weights])
        except (pyarrow.ArrowInvalid, OSError):  # the run was killed while it wrote
            continue
        groups = [group(list(same), weights) for _, same in groupby(rows, key=lambda row: row["prompt"])]
        if rows:
            steps.append({"step": rows[0]["step"], "rows": len(rows), "groups": fitting(groups, SIZE // len(chosen))})
    return {"steps": steps, "shown": len(steps), "logged": len(files)}


KEPT = ("step", "prompt", "completion", "advantage")


def read_rows(file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file, of those columns that it has; what is no UTF-8 is replaced."""
    table = parquet.read_table(file)
    columns = {}
    for name in names:
        if name in table.column_names:
            column = table[name]
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                cells = column.cast(pyarrow.large_binary()).to_pylist()
                columns[name] = [cell.decode(errors="replace") for cell in cells]
            else:
                columns[name] = column.to_pylist()
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def group(rows: Sequence[dict[str, Any]], weights: dict[str, float]) -> dict[str, Any]:
    """Return a prompt and its completions, the highest reward first; one without a reward comes last."""
    completions: list[dict[str, Any]] = []
    for row in rows:
        given = {name: number(row.get(name)) for name in weights}
        parts = [weights[name] * value for name, value in given.items() if value is not None]
        completions.append(
            {
                "text": shortened(row["completion"]),
                "reward": number(sum(parts)) if parts else None,
                "rewards": given,
                "advantage": number(row.get("advantage")),
            }
        )
    completions.sort(key=lambda row: -math.inf if row["reward"] is None else row["reward"], reverse=True)
    return {"prompt": shortened(rows[0]["prompt"]), "size": len(completions), "completions": completions}


def number(value: float | None) -> float | None:
    """Return a number with as many digits as are read; None for what is none."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def fitting(groups: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the first groups, of at most `size` bytes together; of the first one best and worst in any case."""
    kept: list[dict[str, Any]] = []
    for found in groups:
        size -= len(as_data(found).encode())
        if size < 0:
            break
        kept.append(found)
    if not kept and groups:
        ends = groups[0]["completions"]
        kept = [{**groups[0], "completions": [ends[0], ends[-1]] if len(ends) > 1 else ends}]
    return kept


def as_data(content: Any) -> Markup:
    """Return JSON that stays data wherever it stands in a page: no character in it begins or ends markup."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def shortened(said: Any) -> str:
    """Return a text, or the messages of a conversation, as a text for UTF-8; without its middle if it is long."""
    if isinstance(said, list):
        said = (
            said[0]["content"] if len(said) == 1 else "\n".join(f"{part['role']}: {part['content']}" for part in said)
        )
    text = str(said)
    if len(text) > LENGTH:
        left_out = len(text) - LENGTH
        text = f"{text[: LENGTH * 2 // 3]}\n[… {left_out} characters are left out here …]\n{text[-LENGTH // 3 :]}"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
