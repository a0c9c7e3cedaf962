"""The files of `task.dataset`: which builder reads them, and whether they are there. No heavy import here."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.library import BUILDERS, suffix_of
from grpo.config.mixture import single_tasks, where
from grpo.config.secrets import is_secret
from grpo.utils.errors import ConfigError


def check_files(task: DictConfig) -> None:
    """Check that the file to train or to evaluate on is there, before any library is loaded; of each task of a mixture.

    Raises:
        ConfigError: it is not, or it is of a kind that is not read.
    """
    for name, single in single_tasks(task).items():
        check_files_of(single, where(name))


def check_files_of(task: DictConfig, place: str) -> None:
    """Check the files of a task, which is at this place in the configuration; see `check_files`."""
    arguments = arguments_of(task)
    if "generator" in arguments:
        return
    try:
        from_file(arguments)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{place}.dataset={in_one_line(arguments)}: {error}") from error


def arguments_of(task: DictConfig) -> dict[str, Any]:
    """Return the arguments of `datasets.load_dataset`, or a generator and its arguments."""
    arguments: dict[str, Any] = OmegaConf.to_container(task.dataset, resolve=True)  # type: ignore[assignment]
    return {key: value for key, value in arguments.items() if key != "streaming" or value}


def from_file(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `datasets.load_dataset`, with the builder for `path` or `data_files` if these are files."""
    path, files = str(arguments.get("path") or ""), arguments.get("data_files")
    if not files and not path:
        raise ValueError("name your file: task.dataset.path=my_problems.jsonl")
    if path and (files or not (suffix_of(path) in BUILDERS or Path(path).is_file())):
        return arguments  # a builder, a folder, or a data set on the hub
    first = files or path
    while isinstance(first, dict | list) and first:
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    suffix = suffix_of(first)
    if suffix not in BUILDERS:
        raise ValueError(f"{first}: of files only these are read: {', '.join(BUILDERS)}, also as .gz")
    if "://" not in str(first) and "*" not in str(first) and not Path(str(first)).is_file():
        raise FileNotFoundError(f"there is no file {Path(str(first)).absolute()}")
    separator = {"sep": "\t"} if suffix == ".tsv" else {}
    return {**separator, **arguments, "path": BUILDERS[suffix], "name": None, "data_files": files or path}


def broken_line(arguments: dict[str, Any]) -> str | None:
    """Return file, number and beginning of the first line of a JSONL file that is no JSON; None of another file."""
    file = Path(str(arguments.get("data_files") or arguments.get("path")))
    if file.suffix not in (".jsonl", ".ndjson") or not file.is_file():
        return None
    with file.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                json.loads(line.strip() or "null")
            except ValueError:
                return f"{file}, line {number}: {line.strip()[:80]!r}"
    return None


def in_one_line(arguments: dict[str, Any]) -> str:
    """Return arguments that are given, in one line, without secrets."""
    given = {key: value for key, value in arguments.items() if value is not None}
    shown = {key: "…" if is_secret(key, value) else value for key, value in given.items()}
    return "{" + ", ".join(f"{key}: {value}" for key, value in shown.items()) + "}"
