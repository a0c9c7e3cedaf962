"""Columns beside the completions: the data's, so that these can be scored again later, of groups, and of rewards."""

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
import torch

from grpo.generation.kept_tokens import KeptLogprob
from grpo.trainer import trl
from grpo.trainer.batch import Batch
from grpo.trainer.processes import own_part
from grpo.trainer.rollout.completion import Completion, Row
from grpo.trainer.rollout.stages import Stage
from grpo.trainer.rollout.thumbnails import COLUMN, Thumbnails
from grpo.utils.table import OF_COMPLETIONS

REFUSES = (pyarrow.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow for a value that it does not know, or that has another type than those before it."""
GROUP = "group_id"
"""Argument of rewards that compare the completions of a group."""


@dataclass
class LoggedColumns(Stage):
    """Logs the columns of the data, small images, and of completions whether they were truncated and their tokens."""

    thumbnails: Thumbnails

    def completed(self, trainer: Any, rows: list[Row], ids: list[list[int]]) -> None:
        """Log the columns of this process's completions."""
        progress = min(1.0, (trainer.state.global_step + 1) / max(1, trainer.state.max_steps))
        pictures = self.thumbnails if trainer.log_completions else None
        ends = trl.end_tokens(trainer)
        truncated = [not tokens or tokens[-1] not in ends for tokens in ids]
        columns: dict[str, list[Any]] = {"completion_tokens": list(map(len, ids)), "truncated": truncated}
        for column, values in (columns | kept_columns(rows, trainer.reward_func_names, pictures, progress)).items():
            trl.log_column(trainer, column, values)


@dataclass
class Numbers(Stage):
    """Numbers the completions of a training, in the batch and in the table, as `completion_id`."""

    count: int = 0
    """Completions of all processes so far."""

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch with the numbers of its completions."""
        if not trainer.model.training:
            return batch_of()
        numbers = range(self.count, self.count + len(completions))
        self.count += len(completions)
        for number, completion in zip(numbers, completions, strict=True):
            completion.columns["completion_id"] = number
        return batch_of() | {"completion_id": torch.tensor(own_part(trainer.accelerator, numbers))}


def kept_columns(
    rows: Sequence[dict[str, Any]], rewards: Sequence[str], pictures: Thumbnails | None, progress: float
) -> dict[str, list[Any]]:
    """Return the columns of rows that a table can have, and the files of their images.

    Args:
        rows: of the data.
        rewards: names of the rewards, which are columns too.
        pictures: writes the images; None where these are not logged.
        progress: part of the run that is over after this step, 0 to 1.
    """
    columns = {}
    for column in (name for name in rows[0] if name not in OF_COMPLETIONS and name not in rewards):
        values = [row[column] for row in rows]
        if all(isinstance(value, str | int | float | list | None) for value in values):
            columns[column] = values
    if pictures and "images" in rows[0]:
        columns[COLUMN] = [pictures.keep(row["images"], progress) for row in rows]
    return columns


def unique(logged: dict[str, list[Any]], others: Collection[str], count: int) -> dict[str, list[Any]]:
    """Return columns that rewards have logged, of `count` values, under names that no other column of the table has.

    Args:
        logged: as TRL collects them: where several rewards have logged a column, one's values follow another's.
        others: columns of this table.
    """
    columns: dict[str, list[Any]] = {}
    for logged_name, values in logged.items():
        for start in range(0, len(values), count):
            name = logged_name
            while name in others or name in columns or name in OF_COMPLETIONS:
                name += "_"
            columns[name] = values[start : start + count]
    return columns


def compares(reward: Any) -> bool:
    """Return whether a reward compares the completions of a group, and so takes the argument `group_id`."""
    if isolated := getattr(reward, "isolated", None):
        return isolated.compares
    return not isinstance(reward, torch.nn.Module) and GROUP in inspect.signature(reward).parameters


def with_groups(rows: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the rows of this process, each with the number of its group of `size` completions.

    Raises:
        ValueError: a group is divided over processes.
    """
    if len(rows) % size:
        raise ValueError(
            f"a reward compares the {size} completions of a group, and each process has {len(rows)}: a process needs "
            "whole groups; raise per_device_train_batch_size or per_device_eval_batch_size"
        )
    return [row | {GROUP: place // size} for place, row in enumerate(rows)]


def fitting(values: Iterable[Any]) -> list[Any]:
    """Return a column with None for values that Arrow cannot keep in it together with those before."""
    column = list(values)
    if is_known(column):
        return column
    cells: list[Any] = []
    for value in column:
        cells.append(value if is_known([*cells, value]) else None)
    return cells


def keep_writable(columns: dict[str, deque[Any]]) -> None:
    """Replace what Arrow cannot write in each column by None, and warn of it."""
    for name, values in columns.items():
        cells = fitting(values)
        if any(new is None and value is not None for new, value in zip(cells, values, strict=True)):
            warnings.warn(f"log_extra({name!r}): some values cannot be in one column with the others", stacklevel=2)
            values.clear()
            values.extend(cells)


def is_known(values: list[Any]) -> bool:
    """Return whether values can be in one column."""
    try:
        pyarrow.array(values)
    except REFUSES:
        return False
    return True


def to_tensor(values: Iterable[Any]) -> torch.Tensor:
    """Return a column as bytes, in Arrow's IPC format; shape [bytes], uint8."""
    table, sink = pyarrow.table({"column": pyarrow.array(fitting(values))}), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)


def from_tensor(column: torch.Tensor) -> list[Any]:
    """Return the values of a tensor of `to_tensor`."""
    with pyarrow.ipc.open_stream(column.cpu().numpy().tobytes()) as stream:
        return stream.read_all()["column"].to_pylist()


def as_tensors(completion: Completion) -> dict[str, Any]:
    """Return a completion without images of its own as `torch.load` takes it with `weights_only`."""
    logps = completion.logps and [value if value is None else float(value) for value in completion.logps]
    kept_tokens = completion.logps and [list(getattr(value, "kept", ())) for value in completion.logps]
    columns = {name: to_tensor([value]) for name, value in completion.columns.items()}  # one may be none of Arrow's
    return vars(completion) | {"logps": logps, "kept": kept_tokens, "columns": columns}


def from_tensors(row: dict[str, Any]) -> Completion:
    """Return the completion that `as_tensors` was given."""
    kept_tokens, columns = row["kept"], row["columns"]
    if isinstance(columns, torch.Tensor):  # of version 0.2.0
        columns = from_tensor(columns)[0] or {}
    else:
        columns = {name: from_tensor(value)[0] for name, value in columns.items()}
    logps = row["logps"]
    if kept_tokens and any(kept_tokens):
        both = zip(logps, kept_tokens, strict=True)
        logps = [None if value is None else KeptLogprob(value, tokens) for value, tokens in both]
    fields = {name: value for name, value in row.items() if name != "kept"}
    return Completion(**fields | {"columns": columns, "logps": logps})
