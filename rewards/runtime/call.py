"""One call of a reward function, and what came of it: a number for each row, or what was wrong."""

import inspect
import math
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from rewards.runtime.loader import what_and_where


@dataclass
class Fault:
    """What went wrong with a call or with one of its rows."""

    kind: str
    """The exception's name, or `WrongLength`, `NotANumber`, `NotFinite`, `Timeout`, `Died`."""
    message: str
    traceback: str = ""


@dataclass
class Outcome:
    """What a call gave: a reward or None for each row, and which rows had a fault."""

    rewards: list[float | None] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)
    failed: Fault | None = None
    """What was wrong with the call as a whole."""
    extra: list[tuple[str, list[Any]]] = field(default_factory=list)
    """Calls of TRL's `log_extra` and, below, of `log_metric`, to be repeated where the trainer is."""
    metrics: list[tuple[str, float]] = field(default_factory=list)


def call(function: Callable[..., Any], arguments: dict[str, Any], run: Callable[..., Any]) -> Outcome:
    """Call a reward function with TRL's arguments, awaiting it with `run` if it is async; check what it returns."""
    outcome = Outcome()

    def log_extra(column: str, values: list[Any]) -> None:
        outcome.extra.append((column, list(values)))

    def log_metric(name: str, value: float) -> None:
        outcome.metrics.append((name, float(value)))

    try:
        found = function(**arguments, log_extra=log_extra, log_metric=log_metric)
        if inspect.isawaitable(found):
            found = run(_awaited(found))
        found = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(found, list | tuple):
            outcome.failed = Fault("WrongLength", f"returned {type(found).__name__}, not a list of rewards")
            return outcome
        wanted = len(arguments["completions"])
        if len(found) != wanted:
            outcome.failed = Fault("WrongLength", f"returned {len(found)} rewards for {wanted} completions")
            return outcome
        for row, value in enumerate(found):
            number, fault = checked(value)
            outcome.rewards.append(number)
            if fault:
                outcome.faults[row] = fault
        outcome.extra = [(column, values) for column, values in outcome.extra if len(values) == wanted]
    except BaseException as error:  # SystemExit too: a function that calls exit() has given no reward
        message, place = what_and_where(error), traceback.format_exc()
        return Outcome(failed=Fault(type(error).__name__, message, place))
    return outcome


async def _awaited(value: Any) -> Any:
    return await value


def checked(value: Any) -> tuple[float | None, Fault | None]:
    """Return a reward as a float, or None and why not. None itself is TRL's way to leave a row out."""
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:  # NumPy's and PyTorch's numbers
        with suppress(Exception):
            value = value.item()
    if value is None:
        return None, None
    if isinstance(value, BaseException):  # of a row among others, as `asyncio.gather` gives it back
        return None, Fault(type(value).__name__, what_and_where(value), "".join(traceback.format_exception(value)))
    if not isinstance(value, Real):
        return None, Fault("NotANumber", f"returned {value!r:.80}, which is not a number")
    if not math.isfinite(value):
        return None, Fault("NotFinite", f"returned {value!r}")
    return float(value), None
