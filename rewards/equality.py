"""Equality of two answers: as numbers, times, text, lists or mathematics."""

import re
import threading

from rewards.notation import CALCULATES, LONGEST, bare, items, numbers, plain, stated, time_of

WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
UNIT = re.compile(
    rf"(.*\d.*?)\s*\\(?:text|mathrm|mbox)\{{(?!\s*{CALCULATES})[^{{}}]*\}}(?:\^\{{?\d\}}?)?\.?", re.DOTALL
)
"""An expression with its unit in LaTeX."""
SECONDS = 5
"""Limit of the symbolic comparison of an answer, seconds."""
EXACT = 1e-5
"""Largest relative difference of equal values, of which one may be rounded."""


def same(answer: str, reference: str) -> bool:
    """Return whether two answers are equal: as numbers, text, times or lists, or without words as mathematics."""
    expected, hours = numbers(reference), time_of(reference)
    values = numbers(answer) or (numbers(stated(answer)) if expected else ())
    if values and expected:
        return values[0] == expected[0] if len(values) == len(expected) else bool({*values} & {*expected})
    if bare(answer).casefold() == bare(reference).casefold():
        return bool(answer.strip())
    if max(len(answer), len(reference)) > LONGEST:
        return False
    if hours or time_of(answer):
        return hours == (time_of(answer) or time_of(stated(answer)))
    members, wanted = items(answer), items(reference)
    if len(members) > 1 or len(wanted) > 1:
        return _same_members(members, wanted, answer.strip().startswith("[") and reference.strip().startswith("["))
    answer, reference = (UNIT.sub(r"\1", text) if UNIT.fullmatch(text) else text for text in (answer, reference))
    if not answer.strip() or WORD.search(plain(answer)) or WORD.search(plain(reference)):
        return False
    return _same_mathematics(answer, reference)


def _same_members(members: list[str], wanted: list[str], in_order: bool) -> bool:
    """Return whether two lists have equal members, in any order unless both are in square brackets."""
    if len(members) != len(wanted):
        return False
    if in_order:
        return all(map(same, members, wanted))
    for member in members:
        if (match := next((other for other in wanted if same(member, other)), None)) is None:
            return False
        wanted.remove(match)
    return True


def _same_mathematics(answer: str, reference: str) -> bool:
    """Compare expressions, sets, intervals and equations with math-verify."""
    from math_verify import LatexExtractionConfig, parse, verify  # takes a second to import, and is rarely needed

    extraction = [LatexExtractionConfig()]
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None  # its timeout needs a signal
    expected, value = (parse(f"${text.strip('$')}$", extraction, parsing_timeout=limit) for text in (reference, answer))
    if not (expected and value and verify(expected, value, timeout_seconds=limit)):
        return False
    try:  # for math-verify all values below 1e-15 are equal
        return bool(abs(value[0] / expected[0] - 1).evalf() < EXACT)
    except (TypeError, AttributeError, ValueError):  # no values: sets, equations, expressions with variables
        return True
