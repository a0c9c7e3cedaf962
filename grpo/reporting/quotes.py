"""The completions that a finding is about, for the page to quote and to link to."""

from collections.abc import Callable, Iterator
from typing import Any

Row = dict[str, Any]
MOST = 2
"""Completions per finding."""
LENGTH = 300
"""Characters of a completion that are quoted."""


def quotes(finding: str, browse: Row) -> list[Row]:
    """Return the newest completions of a page that a finding is about, as `step`, `row` and `text`; none for others.

    Args:
        finding: its name.
        browse: steps, groups and completions, as of `grpo.reporting.completions.sample`.
    """
    if finding not in ABOUT:
        return []
    chosen: list[Row] = []
    for step, group, row in newest_first(browse):
        if ABOUT[finding](row, group):
            chosen.append({"step": step, "row": row["row"], "text": text_of(row)[:LENGTH]})
        if len(chosen) == MOST:
            break
    return chosen


def newest_first(browse: Row) -> Iterator[tuple[int, Row, Row]]:
    """Yield step, group and completion."""
    for step in reversed(browse["steps"]):
        for group in step["groups"]:
            for row in group["completions"]:
                yield step["step"], group, row


def text_of(row: Row) -> str:
    """Return a completion as one text."""
    return "\n".join(turn["text"] for turn in row["turns"]) if "turns" in row else row["text"]


def truncated(row: Row, group: Row) -> bool:
    """Return whether a completion was truncated."""
    return row.get("truncated") is True


def without_reward(row: Row, group: Row) -> bool:
    """Return whether a completion has no reward, or lacks that of a function."""
    return None in (row["reward"], *row["rewards"].values())


def of_equal_group(row: Row, group: Row) -> bool:
    """Return whether all completions of a group have the same reward."""
    return len({completion["reward"] for completion in group["completions"]}) == 1


def rewarded_and_incorrect(row: Row, group: Row) -> bool:
    """Return whether an incorrect completion has the highest reward of its group."""
    return row["correct"] is False and row["reward"] == group["completions"][0]["reward"]


def without_call(row: Row, group: Row) -> bool:
    """Return whether a completion has called no tool."""
    return "turns" not in row


def with_failed_call(row: Row, group: Row) -> bool:
    """Return whether a tool has returned an error."""
    return bool(row["failed"])


def without_answer(row: Row, group: Row) -> bool:
    """Return whether a conversation ends with the result of a tool."""
    return row.get("turns", [{}])[-1].get("who") == "tool"


ABOUT: dict[str, Callable[[Row, Row], bool]] = {
    "reward_errors": without_reward,
    "hacking": rewarded_and_incorrect,
    "drowned": rewarded_and_incorrect,
    "groups_equal": of_equal_group,
    "too_easy": of_equal_group,
    "too_hard": of_equal_group,
    "cut_off": truncated,
    "never_called": without_call,
    "tools_fail": with_failed_call,
    "turns_used_up": without_answer,
}
"""By the name of the finding."""
