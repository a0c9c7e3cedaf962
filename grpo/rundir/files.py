"""Files of a run directory: their names, and reading and writing without partial files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo.utils.atomic import atomic

RESOLVED_CONFIG = "resolved_config.yaml"
"""The configuration that was run: with the choices of the plan and of the machine."""
ERRORS_FILE = "reward_errors.jsonl"
"""The first completion of each kind of error in a reward function."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dictionary if it is not there.

    Raises:
        ValueError: it is broken.
    """
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file}: broken JSON, {error}") from error


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic(file) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, none if there is no such file; an incomplete last line is skipped."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines atomically."""
    with atomic(file) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
