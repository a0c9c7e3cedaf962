"""The rows of a task, by its name or its YAML, with the columns that its rewards get."""

import importlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from rewards.checking import read_rows
from rewards.isolation.loader import what_and_where

SHIPPED = Path(__file__).parents[2] / "conf"
OF_TASK = re.compile(r"task[.=]")
"""Words that name a task or change a key of it, as on the command line of a run."""


def configuration(group: str, name: str) -> Path | None:
    """Return the file of a choice, as a run finds it: of this project, of GRPO_CONFIG_DIR, of `./conf`."""
    folders = (SHIPPED, os.environ.get("GRPO_CONFIG_DIR"), "conf")
    files = (Path(folder, group, f"{name}.yaml") for folder in folders if folder)
    return next((file for file in files if file.is_file()), None)


def rows_of(words: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return the first rows of a task; `question` is its prompt, `answer` the reference answer.

    Args:
        words: `task=NAME_OR_YAML` and `task.key=value`.

    Raises:
        ValueError: there is no such task, or its rows are in no file of this machine.
    """
    (name, *_) = [word.partition("=")[2] for word in words if word.startswith("task=")] or [""]
    file = Path(name) if name.endswith((".yaml", ".yml")) else configuration("task", name)
    if not (file and file.is_file()):
        raise ValueError(f"task={name}: no such task; name a YAML, or a file of conf/task without its suffix")
    changes = OmegaConf.from_dotlist([word for word in words if not word.startswith("task=")])
    task: Any = OmegaConf.merge({"task": load_yaml(file).get("task", {})}, changes).task
    if task.get("tasks"):
        raise ValueError(f"task={name}: several tasks; name one of them")
    answer = task.get("answer") or {}
    column, pattern = answer.get("column", "answer"), answer.get("pattern")
    return [prepared(row, task.get("prompt", "{question}"), column, pattern) for row in read(task, name, count)]


def load_yaml(file: Path) -> Any:
    """Return the content of a YAML; ValueError, in a line, if it is none."""
    try:
        return OmegaConf.load(file)
    except (YAMLError, OSError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error


def read(task: DictConfig, name: str, count: int) -> list[dict[str, Any]]:
    """Return the rows of a task as they are in its file, or as its generator makes them."""
    arguments = {key: value for key, value in task.get("dataset", {}).items() if key != "streaming"}
    if generator := arguments.pop("generator", None):
        module, _, function = generator.rpartition(".")
        try:
            return getattr(importlib.import_module(module), function)(split="train", **{**arguments, "size": count})
        except Exception as error:
            raise ValueError(f"task={name}: {what_and_where(error)}") from error
    file = Path(str(arguments.get("path") or ""))
    if file.suffix in (".jsonl", ".ndjson"):
        return read_rows(file, count)
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(file).slice(0, count).to_pylist()
    if file.suffix == ".csv":
        import pandas

        return pandas.read_csv(file, nrows=count).to_dict("records")
    where = f"its rows are in {file}" if str(file) != "." else "it names no file: task.dataset.path=…"
    raise ValueError(f"task={name}: {where}; the check reads JSONL, CSV and Parquet: name such a file with --data")


def prepared(row: dict[str, Any], prompt: str, column: str | None, pattern: str | None) -> dict[str, Any]:
    """Return a row with the prompt as `question`, and with the reference answer."""
    known = {**row}
    if column:
        if column not in row:
            raise ValueError(f"task.answer.column={column}: the rows have: {', '.join(row)}")
        text = str(row[column])
        match = re.search(pattern, text) if pattern else None
        known["answer"] = (match[1] if match else text).strip()
    try:
        known["question"] = row[prompt] if prompt in row else prompt.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError):  # a template that only a run fills
        known.setdefault("question", "")
    return known
