"""Columns of the data that are logged with the completions, so that these can be scored again later."""

from collections.abc import Sequence
from typing import Any

from grpo.trainer.rollout.thumbnails import COLUMN, Thumbnails

TAKEN = {
    *("prompt", "images", "step", "completion", "completion_id", "completion_ids", "advantage"),
    *("tokens", "truncated", COLUMN),
}
"""Columns of a table of completions that are not the data's."""


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
    for column in (name for name in rows[0] if name not in TAKEN and name not in rewards):
        values = [row[column] for row in rows]
        if all(isinstance(value, str | int | float | list | None) for value in values):
            found[column] = values
    if pictures and "images" in rows[0]:
        found[COLUMN] = [pictures.keep(row["images"], progress) for row in rows]
    return found
