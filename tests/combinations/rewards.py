"""Rewards of the combinations, each a function of tokens and problem."""

import functools
from collections import Counter
from typing import Any


def number_of_correct(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float]:
    """Anything, but equal within the groups of every third problem."""
    return [1.0 if of % 3 == 1 else float(sum(ids) % 3 == 0) for ids, of in zip(completion_ids, number, strict=True)]


def brevity(completion_ids: list[list[int]], task: list[str], **columns: Any) -> list[float | None]:
    """A reward for one of two tasks."""
    return [1 / len(ids) if of == "first" else None for ids, of in zip(completion_ids, task, strict=True)]


def failing(completion_ids: list[list[int]], number: list[int], **columns: Any) -> list[float | None]:
    """No reward for some completions, and for none of a problem's."""
    return [
        None if of % 5 == 1 or sum(ids) % 4 == 0 else float(sum(ids) % 3)
        for ids, of in zip(completion_ids, number, strict=True)
    ]


def shortest(completion_ids: list[list[int]], group_id: list[int] | None = None, **columns: Any) -> list[float]:
    """1 for the shortest completions of each group, which are four in a row."""
    groups = group_id or [place // 4 for place in range(len(completion_ids))]
    least: dict[int, int] = {}
    for group, ids in zip(groups, completion_ids, strict=True):
        least[group] = min(least.get(group, len(ids)), len(ids))
    return [float(len(ids) == least[group]) for group, ids in zip(groups, completion_ids, strict=True)]


def of_various(reward: Any) -> Any:
    """A reward that is None for completions most of whose sequences of four tokens repeat others."""

    @functools.wraps(reward)
    def given(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        found = []
        for ids, value in zip(completion_ids, reward(completion_ids=completion_ids, **columns), strict=True):
            seen = Counter(zip(*(ids[start:] for start in range(4)), strict=False))
            found.append(None if sum(seen.values()) - len(seen) > 0.5 * sum(seen.values()) else value)
        return found

    return given


REWARDS: dict[str, list[Any]] = {
    "one": [number_of_correct],
    "two, added": [number_of_correct, brevity],
    "two, each normalized": [number_of_correct, brevity],
    "failing": [failing],
    "group-relative": [shortest],
}
