"""Columns that reward functions log beside the completions: Arrow can write them, and a checkpoint can hold them."""

import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any

import pyarrow
import torch

REFUSES = (pyarrow.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow for a value that it does not know, or that has another type than those before it."""


def fitting(values: Iterable[Any]) -> list[Any]:
    """Return a column with None for values that Arrow cannot keep in it together with those before."""
    column = list(values)
    if is_known(column):
        return column
    kept: list[Any] = []
    for value in column:
        kept.append(value if is_known([*kept, value]) else None)
    return kept


def keep_writable(columns: dict[str, deque[Any]]) -> None:
    """Replace what Arrow cannot write in each column by None, and warn of it."""
    for name, values in columns.items():
        kept = fitting(values)
        if any(new is None and value is not None for new, value in zip(kept, values, strict=True)):
            warnings.warn(f"log_extra({name!r}): some values cannot be in one column with the others", stacklevel=2)
            values.clear()
            values.extend(kept)


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
