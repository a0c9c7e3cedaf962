"""Files of a run directory: their names, and reading and writing without partial files."""

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo.utils.atomic import atomic

RESOLVED_CONFIG = "resolved_config.yaml"
"""The configuration that was run: with the choices of the plan and of the machine."""
ERRORS_FILE = "reward_errors.jsonl"
"""The first completion of each kind of error in a reward function."""


def read_json(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; an empty dictionary without it, or if a crash has torn it, which is said."""
    content = read(file, json.loads)
    return content if isinstance(content, dict) else {}


def read(file: Path, parse: Callable[[str], Any]) -> Any:
    """Return the content of a small file; None without it, or if a crash of the machine has torn it, which is said."""
    try:
        content = parse(file.read_text(encoding="utf-8")) if file.exists() else None
    except (ValueError, yaml.YAMLError):
        content = None
    if content is None and file.exists():
        print(f"skipped: {file} is torn, as by a crash", file=sys.stderr)
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic(file) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, none if there is no such file; torn lines are skipped."""
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if file.exists() else []
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def write_lines(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON lines atomically."""
    with atomic(file) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
