"""From 1 for a short correct completion down to 0 for a long one, in comparison with the correct ones of its group."""

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from rewards.isolation.loader import bind, load


def concise(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    group_id: Sequence[int],
    grader: Mapping[str, Any],
    **columns: Any,
) -> list[float]:
    """Score the lengths of the correct completions of each group; incorrect completions get 0.

    With z the number of standard deviations by which a correct completion is longer than the mean of the correct
    completions of its group, the reward is 1 - sigmoid(z): 0.5 if all of these are equally long. The reward of
    "Training language models to reason efficiently" (2502.04463) is 1 - alpha sigmoid(z) for correct completions and 0
    for others. `correctness` with weight 1 and this reward with weight w add up to (1 + w) times it, for
    alpha = w / (1 + w): a correct completion always earns more than an incorrect one.

    Args:
        group_id: of each completion, the same number for completions of one group.
        grader: `fn` and `kwargs` of the reward that is 1 for a correct completion.
    """
    arguments = {"completions": completions, "completion_ids": completion_ids, "group_id": group_id}
    graded = bind(load(grader["fn"], "grader.fn"), "grader", grader.get("kwargs") or {})(**columns | arguments)
    correct = asyncio.run(graded) if inspect.iscoroutine(graded) else graded
    groups = defaultdict(list)
    for group, tokens, grade in zip(group_id, completion_ids, correct, strict=True):
        if grade == 1:
            groups[group].append(len(tokens))
    rewards = []
    for group, tokens, grade in zip(group_id, completion_ids, correct, strict=True):
        lengths = groups[group]
        above = (len(tokens) - fmean(lengths)) / (pstdev(lengths) or 1.0) if grade == 1 else math.inf
        rewards.append(1 / (1 + math.exp(min(above, 700.0))) if grade == 1 else 0.0)
    return rewards
