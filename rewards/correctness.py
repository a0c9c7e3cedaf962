"""1 for a completion whose final answer is the reference's, 0 for any other."""

import re
import threading
from collections.abc import Sequence
from typing import Any

from rewards.text import LONGEST, MARKED, final_answer, numbers, text_of

WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
SECONDS = 5
"""Limit of the symbolic comparison of an answer, seconds."""


def correctness(
    completions: Sequence[Any], answer: Sequence[str], find: Sequence[str] = (*MARKED, "text"), **columns: Any
) -> list[float]:
    """Compare each completion's final answer with the reference.

    Args:
        find: places of the final answer in the order of the search; see `rewards.text.final_answer`.
    """
    return [float(same(final_answer(text_of(c), find), str(a))) for c, a in zip(completions, answer, strict=True)]


def same(answer: str, reference: str) -> bool:
    """Whether two final answers are equal: exactly as numbers, as text, or as mathematics if they are not words."""
    values, expected = numbers(answer), numbers(reference)
    if values and expected:
        return values[0] == expected[0] if len(values) == len(expected) else bool({*values} & {*expected})
    if " ".join(answer.split()).casefold() == " ".join(reference.split()).casefold():
        return bool(answer.strip())
    if not answer.strip() or len(answer) > LONGEST or WORD.search(answer) or WORD.search(reference):
        return False
    return _same_mathematics(answer, reference)


def _same_mathematics(answer: str, reference: str) -> bool:
    """Compare expressions, sets, intervals and equations with math-verify."""
    from math_verify import LatexExtractionConfig, parse, verify  # takes a second to import, and is rarely needed

    extraction = [LatexExtractionConfig()]
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None  # its timeout needs a signal
    expected, given = (parse(f"${text.strip('$')}$", extraction, parsing_timeout=limit) for text in (reference, answer))
    return bool(expected and given and verify(expected, given, timeout_seconds=limit))
