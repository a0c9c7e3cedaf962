"""Columns that reward functions log beside the completions: Arrow can write them, and a checkpoint can hold them."""

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow
import torch

REFUSES = (pyarrow.ArrowException, ValueError, TypeError, OverflowError)
"""What Arrow raises for a value that it does not know, or that has another type than those before it."""


def fitting(values: Sequence[Any], before: Iterable[Any]) -> list[Any]:
    """Return new values of a column, with None for those that Arrow cannot keep in it.

    Args:
        before: values that the column has.
    """
    column = [*before, *values]
    if is_known(column):
        return list(values)
    first = next((value for value in column if value is not None and is_known([value])), None)
    return [value if is_known([first, value]) else None for value in values]


def is_known(values: list[Any]) -> bool:
    """Return whether values can be in one column."""
    try:
        pyarrow.array(values, from_pandas=True)
    except REFUSES:
        return False
    return True


def to_tensor(values: Sequence[Any]) -> torch.Tensor:
    """Return a column as bytes, in Arrow's IPC format; shape [bytes], uint8."""
    table, sink = pyarrow.table({"column": pyarrow.array(fitting(list(values), ()))}), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)


def from_tensor(column: torch.Tensor) -> list[Any]:
    """Return the values of what `to_tensor` has made."""
    with pyarrow.ipc.open_stream(column.cpu().numpy().tobytes()) as stream:
        return stream.read_all()["column"].to_pylist()
