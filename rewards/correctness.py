"""1 for a completion whose final answer is the reference's, 0 for any other."""

import re
import threading
from collections.abc import Sequence
from typing import Any

from rewards.text import FINDERS, LONGEST, final_answer, numbers, text_of

WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
SECONDS = 5  # that the symbolic comparison of one answer may take


def correctness(
    completions: Sequence[Any], answer: Sequence[str], find: Sequence[str] = tuple(FINDERS), **columns: Any
) -> list[float]:
    """Compare each completion's final answer with the reference.

    Args:
        completions: strings, or lists of messages.
        answer: the final answer of each row's reference.
        find: where an answer is looked for, and in which order; see `rewards.text.final_answer`.

    Returns:
        1.0 or 0.0 for each completion.
    """
    return [float(same(final_answer(text_of(c), find), str(a))) for c, a in zip(completions, answer, strict=True)]


def same(answer: str, reference: str) -> bool:
    """Whether two final answers are equal: as numbers, exactly; as text; or as mathematics, if they are not words."""
    values, wanted = numbers(answer), numbers(reference)
    if values and wanted:
        return values[0] == wanted[0] if len(values) == len(wanted) else bool({*values} & {*wanted})
    if " ".join(answer.split()).casefold() == " ".join(reference.split()).casefold():
        return bool(answer.strip())
    if not answer.strip() or len(answer) > LONGEST or WORD.search(answer) or WORD.search(reference):
        return False
    return _same_mathematics(answer, reference)


def _same_mathematics(answer: str, reference: str) -> bool:
    """Compare expressions, sets, intervals and equations with math-verify."""
    from math_verify import LatexExtractionConfig, parse, verify  # a second to import, and rarely needed

    how = [LatexExtractionConfig()]
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None  # it counts time with a signal
    wanted, found = (parse(f"${text.strip('$')}$", how, parsing_timeout=limit) for text in (reference, answer))
    return bool(wanted and found and verify(wanted, found, timeout_seconds=limit))
