"""Files of a run directory, written so that a reader never sees half of one."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing if it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines so that a reader never sees half of them."""
    partial = file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(file)


ERRORS_FILE = "reward_errors.jsonl"
