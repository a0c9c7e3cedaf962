"""The text of completions, their final answer, and the number in it."""

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
FRACTION = r"(?:\d+ +)?\d+ ?/ ?\d+"
NUMBER = re.compile(rf"(?<![\w.])[-+]?[$€£]?[-+]?(?:{FRACTION}|{DIGITS})(?:\s*%)?")
# up to three words of a unit after a number, but none that calculates
UNIT = r"(?:\s(?!(?:pi|plus|minus|times|over|or|and|to|hundred|thousand|million|billion|dozen)\b)[^\W\d_]{2,}){0,3}"
WITH_UNIT = re.compile(
    rf"([-+]?)[$€£]?([-+]?)(?:({DIGITS})|(\d+ +)?(\d+) ?/ ?(\d+))\s*(%|percent\b)?{UNIT}[.!]?", re.IGNORECASE
)
LONGEST = 200
"""Characters of the longest number with its unit."""
FINDERS = {
    "hash": re.compile(r"####[ \t]*([^\n]*)"),
    "boxed": re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"),
    "answer": re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    "last_number": NUMBER,
    "text": re.compile(rf"\A\s*(\S.{{0,{LONGEST}}}?)\s*\Z"),
}
MARKED = ("hash", "boxed", "answer", "last_number")
"""Kinds of final answers with a mark in the text."""


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion, plain or conversational; with tool calls, the policy's last message.

    The text is empty if a tool's result is the last message, because the result is not the policy's answer.
    """
    if isinstance(completion, str):
        return completion
    return "" if completion[-1].get("role") == "tool" else str(completion[-1]["content"])


def printable(text: str) -> str:
    """Return text without control characters, which could move a terminal's cursor."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", " ", text)


def final_answer(text: str, find: Sequence[str] = MARKED) -> str:
    r"""Return the final answer of a text: the last answer of the first kind that occurs; empty if none occurs.

    Args:
        find: kinds in the order of the search: `hash` is the text after `####` on its line, `boxed` the content of
            `\boxed{}`, `answer` the content of `<answer></answer>`, `last_number` the last number, `text` all of a
            text of one short line.
    """
    return found_answer(text, find)[1]


def found_answer(text: str, find: Sequence[str] = MARKED) -> tuple[str, str]:
    """Return the kind of the final answer of a text, and the answer; both empty if there is none."""
    for kind in find:
        answers = FINDERS[kind].findall(plain(text) if kind == "last_number" else text)
        if answers:
            return kind, answers[-1].strip()
    return "", ""


def plain(text: str) -> str:
    """Return text with digits, signs, fractions and spaces of other scripts in ASCII."""
    return text if text.isascii() else "".join(map(_plain_letter, text))


def _plain_letter(letter: str) -> str:
    if letter in "\u2212\u2012\u2013\ufe63\uff0d":
        return "-"
    if unicodedata.decomposition(letter).startswith("<fraction>"):  # 3½ is 3 1/2, not 31/2
        return " " + unicodedata.normalize("NFKC", letter).replace("\u2044", "/")
    if unicodedata.category(letter) == "Zs":
        return " "
    return {"\u066b": ".", "\u066c": ",", "\u2044": "/"}.get(letter) or str(unicodedata.decimal(letter, letter))


def numbers(answer: str) -> tuple[Fraction, ...]:
    """Return the values that a final answer may mean; none if it is not a single number. 50 % may be 50 or 1/2.

    It may have signs, a currency, thousands separators, decimals, a fraction, percent, and a unit of up to three words.
    """
    if len(answer) > LONGEST:
        return ()
    bare = re.sub(r"\\[$%,! ]|[*_`]", lambda markup: markup[0].strip("\\,!*_` "), plain(answer)).strip()
    if not (match := WITH_UNIT.fullmatch(bare)):
        return ()
    sign, inner_sign, decimal, integer, above, below, percent = match.groups()
    if decimal:
        value = Fraction(re.sub("[, ]", "", decimal))
    elif int(below):
        value = int(integer or 0) + Fraction(int(above), int(below))
    else:
        return ()
    if "-" in sign + inner_sign:
        value = -value
    return (value, value / 100) if percent else (value,)
