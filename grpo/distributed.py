"""Processes of a run, as torchelastic, `accelerate launch` or Slurm started them: only this module reads their number.

They agree on what only one of them can decide through the store that PyTorch's rendezvous gives them.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from grpo.errors import ConfigError

T = TypeVar("T")
FAILED = "failed"
"""Key of the store: how many processes have failed; with `/reason`, why the first of them did."""


def is_launched() -> bool:
    """Return whether a launcher has started this process and chooses its GPU."""
    return any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def world_size() -> int:
    """Return the number of processes that train."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int | None:
    """Return the number of those on this machine; None if no launcher says."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


def rank() -> int:
    """Return the number of this process among those that train."""
    return int(os.environ.get("RANK", "0"))


def is_main_process() -> bool:
    """Return whether this process is the first of all."""
    return rank() == 0


def restarts() -> int:
    """Return how often all processes have been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def log_name() -> str:
    """Return the name of the log of this process."""
    return "train.log" if is_main_process() else f"train.{rank()}.log"


@functools.cache
def store() -> Any:
    """Return the store that all processes share; the first one or its launcher keeps it.

    A launcher's outlives a restart of all processes, after which they must not read what was agreed before.
    """
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    shared, _, _ = next(rendezvous("env://"))
    return PrefixStore(f"grpo/{restarts()}", shared)


def agreed(name: str, choose: Callable[[], T]) -> T:
    """Return on every process what the first one chooses; JSON values only.

    Args:
        name: of the choice; each is made once.

    Raises:
        ConfigError: the first one has raised it.
    """
    if world_size() == 1:
        return choose()
    if not is_main_process():
        error, value = json.loads(store().get(name))
        if error:
            raise ConfigError(error)
        return value
    try:
        value = choose()
    except ConfigError as error:
        store().set(name, json.dumps([str(error), None]))
        raise
    store().set(name, json.dumps([None, value]))
    return value


def is_first_to_fail(reason: str) -> bool:
    """Note that this process fails; return whether it is the first, whose reason is the one to print."""
    if world_size() == 1:
        return True
    with contextlib.suppress(Exception):  # the store has gone with the process that kept it
        shared = store()
        shared.set_timeout(timedelta(seconds=5))
        if shared.add(FAILED, 1) > 1:
            return False
        shared.set(f"{FAILED}/reason", reason)
    return True


def first_failure() -> str | None:
    """Return why another process has failed; None if none has, or if nobody can say."""
    if world_size() > 1:
        with contextlib.suppress(Exception):
            key = f"{FAILED}/reason"
            if store().check([key]):
                return store().get(key).decode()
    return None


def any_of(flag: bool) -> bool:
    """Return whether a flag is set on any process."""
    return any(gathered([flag]))


def gathered(rows: list[Any]) -> list[Any]:
    """Return the rows of all processes, those of the first one first."""
    if world_size() == 1:
        return rows
    from torch.distributed import all_gather_object

    everyone: list[Any] = [None] * world_size()
    all_gather_object(everyone, rows)
    return [row for of_process in everyone for row in of_process]
