"""A call of a reward function and its outcome: a reward or a fault per completion."""

import datetime
import inspect
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import Any

from rewards.isolation.loader import what_and_where

FLOAT32 = 3.4028234663852886e38
"""The largest number of the type that rewards are summed in (IEEE 754)."""

PLAIN = (bool, int, float, str, bytes, Decimal, datetime.datetime, datetime.date, datetime.time, datetime.timedelta)


DEEPEST = 100
"""Levels of nested lists and dictionaries; Python's own readers and writers end somewhere below a thousand."""


@dataclass
class Fault:
    """A failure of a call or of a completion."""

    kind: str
    """Name of the exception, or `OneForAll`, `WrongLength`, `NotANumber`, `NotFinite`, `Timeout`, `Died`."""
    message: str
    """Reason, file and line, in a single line."""
    traceback: str = ""
    """Traceback of the exception; empty without an exception."""


@dataclass
class Outcome:
    """Result of a call."""

    rewards: list[float | None] = field(default_factory=list)
    """Reward of each completion, or None."""
    faults: dict[int, Fault] = field(default_factory=dict)
    """Faults by the index of their completion."""
    failed: Fault | None = None
    """Fault of the call itself, which then has no rewards."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """Arguments of TRL's `log_extra`: columns with a value per completion."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Calls of TRL's `log_metric`, to be repeated in the process of the trainer."""

    def log_extra(self, column: str, values: Any) -> None:
        values = list(values)
        cleaned = [plain(value) for value in values]
        if any(new is None and value is not None for new, value in zip(cleaned, values, strict=True)):
            warnings.warn(f"log_extra({column!r}): only numbers, text, times, lists and dictionaries", stacklevel=2)
        self.extra.setdefault(column, []).extend(cleaned)

    def log_metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))


def call(function: Callable[..., Any], arguments: dict[str, Any], run: Callable[..., Any]) -> Outcome:
    """Call a reward function with TRL's arguments, awaiting it with `run` if it is async, and check its result."""
    outcome = Outcome()
    try:
        with in_this_process():
            returned = awaited(function(**arguments, log_extra=outcome.log_extra, log_metric=outcome.log_metric), run)
        returned = returned.tolist() if hasattr(returned, "tolist") else returned
        count = len(arguments["completions"])
        if not isinstance(returned, list | tuple) or (len(returned) == 1 < count):
            wanted = "a list with a number, or None, for each is needed"
            batch = f"{count} completions" if count > 1 else "a completion"
            return Outcome(failed=Fault("OneForAll", f"returned {returned!r:.80} for {batch}; {wanted}"))
        if len(returned) != count:
            return Outcome(failed=Fault("WrongLength", f"returned {len(returned)} rewards for {count} completions"))
        for row, value in enumerate(returned):
            number, fault = checked(value)
            outcome.rewards.append(number)
            if fault:
                outcome.faults[row] = fault
        for column, values in list(outcome.extra.items()):
            if len(values) != count:
                warnings.warn(f"log_extra({column!r}): {len(values)} values for {count} completions", stacklevel=2)
                del outcome.extra[column]
    except BaseException as error:  # SystemExit too: a function that calls exit() has given no reward
        return Outcome(failed=fault_of(error))
    return outcome


def fault_of(error: BaseException) -> Fault:
    """Return the fault of an exception."""
    return Fault(type(error).__name__, what_and_where(error), "".join(traceback.format_exception(error)))


def plain(value: Any, depth: int = DEEPEST) -> Any:
    """Return a value that another process, a table and a page can hold: of plain types, with valid text.

    None for an object of a class that only this process knows.

    Raises:
        RecursionError: lists and dictionaries are nested more deeply than this.
    """
    if depth == 0:
        raise RecursionError(f"lists and dictionaries are nested more than {DEEPEST} deep")
    if hasattr(value, "tolist"):  # NumPy's and PyTorch's numbers and arrays
        with suppress(Exception):
            value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {valid_text(str(key)): plain(item, depth - 1) for key, item in value.items()}
    if type(value) is str:
        return valid_text(value)
    return value if type(value) in PLAIN else None


def valid_text(text: str) -> str:
    """Return a text as valid Unicode: half of a UTF-16 pair is replaced, and two halves are joined."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@contextmanager
def in_this_process() -> Iterator[None]:
    """Context that a process forked inside does not leave: it ends there, with the status of its `sys.exit`."""
    pid, status = os.getpid(), 1
    try:
        yield
        status = 0
    except BaseException as error:
        if os.getpid() == pid:
            raise
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        else:
            traceback.print_exception(error)
    finally:
        if os.getpid() != pid:
            sys.stdout.flush()
            os._exit(status & 0xFF)


def awaited(value: Any, run: Callable[..., Any]) -> Any:
    """Return a value; await it with `run` if necessary."""

    async def result() -> Any:
        return await value

    return run(result()) if inspect.isawaitable(value) else value


def checked(value: Any) -> tuple[float | None, Fault | None]:
    """Return a reward as a float, or None and its fault; None itself is no fault, TRL skips the completion."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:  # NumPy's and PyTorch's numbers
        with suppress(Exception):
            value = value.item()
    if value is None:
        return None, None
    if isinstance(value, BaseException):  # of one completion, as `asyncio.gather` returns it
        return None, fault_of(value)
    if not isinstance(value, Real):
        return None, Fault("NotANumber", f"returned {value!r:.80}, which is not a number")
    number = math.inf
    with suppress(OverflowError):  # of an integer beyond any float
        number = float(value)
    if not abs(number) <= FLOAT32:  # also true of NaN
        return None, Fault("NotFinite", f"returned {number!r}, which float32 does not hold")
    return number, None
