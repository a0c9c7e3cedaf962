"""The evaluation of a mixture: of each task with its own grader and limit, and of all problems."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo.data.mixture import COLUMN
from grpo.data.task import Problems
from grpo.rundir.files import read_lines, write_lines
from grpo.utils.estimators import wilson_interval


def held_out_of(problems: Problems, name: str) -> Any:
    """Return the held-out problems of a task; all of them for the task without a name."""
    assert problems.held_out is not None
    if not name:
        return problems.held_out
    return problems.held_out.select([row for row, task in enumerate(problems.held_out[COLUMN]) if task == name])


def file_of(file: Path, name: str) -> Path:
    """Return the file of the completions of a task, beside that of all tasks; itself for the task without a name."""
    return file.with_name(f"{file.stem}_{name}{file.suffix}") if name else file


def in_total(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the accuracy of the problems of all tasks as `evaluate` does, and in `by_task` the result of each."""
    if "" in results:
        return results[""]
    correct, samples = (sum(result[key] for result in results.values()) for key in ("correct", "samples"))
    longest = max(result["decoding"]["max_new_tokens"] for result in results.values())
    return {
        "accuracy": correct / samples,
        "correct": correct,
        "samples": samples,
        "interval": wilson_interval(correct, samples),
        "decoding": {"do_sample": False, "max_new_tokens": longest},
        "by_task": dict(results),
    }


def join_files(file: Path, names: list[str]) -> None:
    """Make one file of the completions of all tasks, whose problems are numbered through, with a `task`."""
    rows: list[dict[str, Any]] = []
    for name in names:
        first = 1 + max((row["problem"] for row in rows), default=-1)
        part = file_of(file, name)
        rows += [{**row, "problem": row["problem"] + first, COLUMN: name} for row in read_lines(part)]
        part.unlink()
    write_lines(file, rows)
