"""1 for a completion whose final answer is the reference's, 0 for any other."""

from collections.abc import Sequence
from typing import Any

from rewards.equality import same
from rewards.text import MARKED, final_answer, text_of


def correctness(
    completions: Sequence[Any], answer: Sequence[str], find: Sequence[str] = (*MARKED, "text"), **columns: Any
) -> list[float]:
    """Compare each completion's final answer with the reference.

    Args:
        find: places of the final answer in the order of the search; see `rewards.text.final_answer`.
    """
    return [float(same(final_answer(text_of(c), find), str(a))) for c, a in zip(completions, answer, strict=True)]
