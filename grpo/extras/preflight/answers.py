"""Lengths and endings of the sampled completions, and the places of their final answers."""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo.extras.preflight.estimators import proportion
from grpo.extras.preflight.samples import Sample, Sampled
from rewards.text import MARKED, found_answer

LOST = 0.01
"""Fraction of the correct completions that a shorter limit may truncate."""
KINDS = {"hash": "marked", "boxed": "marked", "answer": "marked", "": "none"}
"""Kinds of `rewards.text.found_answer`, as the report names them; others have their own name."""


def fraction(problems: Sequence[Sampled], holds: Any) -> dict[str, Any]:
    """Return how many completions fulfil a condition, with the interval over problems."""
    fractions = [fmean(bool(holds(completion)) for completion in problem.completions) for problem in problems]
    return proportion(fractions).as_dict()


def lengths(problems: Sequence[Sampled], limit: int, begins_thought: bool = False) -> dict[str, Any]:
    """Return `truncated`, those truncated `in_thought`, quantiles of the lengths in tokens, and `shortest_limit`.

    Args:
        limit: `max_completion_length`.
        begins_thought: whether prompts end with the beginning of a thought.
    """
    every = sorted(completion.tokens for problem in problems for completion in problem.completions)
    correct = [completion.tokens for problem in problems for completion in problem.completions if completion.correct]
    at = {str(part): every[min(len(every) - 1, math.ceil(part * len(every)) - 1)] for part in (0.5, 0.9, 0.99)}
    return {
        "limit": limit,
        "truncated": fraction(problems, lambda completion: not completion.ended),
        "in_thought": fraction(
            problems, lambda completion: not completion.ended and thinks(completion.text, begins_thought)
        ),
        "mean": fmean(every),
        "quantiles": at,
        "longest": every[-1],
        "shortest_limit": shortest_limit(correct),
    }


def thinks(text: str, begun: bool) -> bool:
    """Return whether a text ends inside a thought, which may have begun before it."""
    _, mark, after = text.rpartition("<think>")
    return "</think>" not in after and bool(mark or begun)


def shortest_limit(correct: Sequence[int]) -> int | None:
    """Return the shortest `max_completion_length` that truncates at most 1 % of correct completions; None without any.

    Args:
        correct: tokens of each correct completion.
    """
    if not correct:
        return None
    return sorted(correct)[len(correct) - 1 - math.floor(LOST * len(correct))]


def places(problems: Sequence[Sampled], find: Sequence[str] | None) -> dict[str, Any] | None:
    """Return how often the final answer was `marked`, the `last_number`, all of a short `text`, or not there: `none`.

    Args:
        find: kinds that the grader looks for; None if it has another way, so that nothing is known.
    """
    if find is None:
        return None

    def kind(sample: Sample) -> str:
        place = found_answer(sample.text, find)[0]
        return KINDS.get(place, place)

    names = list(dict.fromkeys(KINDS.get(place, place) for place in (*find, "")))
    seen = Counter(kind(completion) for problem in problems for completion in problem.completions)
    return {
        name: fraction(problems, lambda completion, name=name: kind(completion) == name)
        for name in names
        if seen[name] or name
    }


def kinds_of(grader: dict[str, Any] | None) -> list[str] | None:
    """Return the kinds of final answers that a grader searches; None for a grader that does not use `rewards.text`.

    Args:
        grader: the grader's options in the configuration.
    """
    if not grader or grader["fn"] != "rewards.correctness.correctness":
        return None
    return list((grader.get("kwargs") or {}).get("find") or (*MARKED, "text"))
