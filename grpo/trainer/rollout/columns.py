"""Columns beside the completions: the data's, so that these can be scored again later, and the numbers of groups."""

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch

from grpo.trainer.rollout.thumbnails import COLUMN, Thumbnails
from grpo.utils.table import OF_COMPLETIONS

GROUP = "group_id"
"""Argument of rewards that compare the completions of a group."""


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
    found = {}
    for column in (name for name in rows[0] if name not in OF_COMPLETIONS and name not in rewards):
        values = [row[column] for row in rows]
        if all(isinstance(value, str | int | float | list | None) for value in values):
            found[column] = values
    if pictures and "images" in rows[0]:
        found[COLUMN] = [pictures.keep(row["images"], progress) for row in rows]
    return found


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
