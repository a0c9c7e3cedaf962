"""1 for a completion whose final answer names the correct option of a multiple-choice question and no other, else 0."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from rewards.notation import BEGIN, UNSPACED
from rewards.text import FINDERS, HEADING, final_part, text_of

LETTER = rf"{BEGIN}(?:[B-HJ]|[AI](?![ \t]+(?!and\b|or\b|is\b)\w\w))(?!-?[^\W{UNSPACED}])"  # not "A dog", "I think"
LABEL = re.compile(rf"\s*(?i:(?:option|choice|answer)\s+)?[(\[]?({LETTER})\s*(?:[)\].:,–—-]|$)")
STATED = re.compile(r"\b(?i:answer|choice|option)\s*(?:is|would be|should be|must be|=|:)[\s:]*")
MARKUP = re.compile(r"[*_`~$\"'“”‘’{}]|\\(?:text(?:bf)?|math(?:rm|bf))?")


def choice(
    completions: Sequence[Any], answer: Sequence[str], options: Sequence[Any] | None = None, **columns: Any
) -> list[float | Exception]:
    """Compare the options that each final answer names with `answer`, the letter of the row's correct option, A to J.

    With `options`, the texts of the row's options, texts count too. A row whose answer is no option gets a ValueError.
    """
    rewards: list[float | Exception] = []
    for completion, reference, texts in zip(completions, map(str, answer), options or [()] * len(answer), strict=True):
        correct = named([reference], texts or ())
        if len(correct) == 1 and (LABEL.match(reference) or _plain(reference) in map(_plain, texts or ())):
            rewards.append(float(named(final_lines(text_of(completion)), texts or ()) == correct))
        else:
            rewards.append(ValueError(f"answer {reference!r:.80}: give a letter from A to J, or the text of an option"))
    return rewards


def final_lines(text: str) -> list[str]:
    """Return the lines that state the final answer, or else those that begin with a letter, or else the last line."""
    text = final_part(text)
    text = (FINDERS["boxed"](text) or [text])[-1]
    hashes = [line for line in FINDERS[HEADING](text) if LABEL.match(MARKUP.sub("", line))] or FINDERS["hash"](text)
    text = MARKUP.sub("", (hashes or [text])[-1])
    if stated := list(STATED.finditer(text)):
        first, *others = text[stated[-1].end() :].split("\n")
        return [re.split(r"\b(?:because|since|not|rather|instead)\b", first)[0], *takewhile(LABEL.match, others)]
    lines = [line for line in text.split("\n") if line.strip()]
    return [line for line in lines if LABEL.match(line)] or lines[-1:]


def named(lines: Sequence[str], options: Sequence[str]) -> set[str]:
    """Return the letters of the options that lines name: by the whole text of an option, or by letters alone."""
    letter_of = {_plain(option): letter for option, letter in zip(options, "ABCDEFGHIJ", strict=False)}
    names = set()
    for line in lines:
        label = LABEL.match(line)
        by_text = letter_of.get(_plain(line[label.end() :] if label else line))
        names |= {by_text, label[1] if label else by_text} if by_text else set(re.findall(LETTER, line))
    return names


def _plain(text: str) -> str:
    return " ".join(MARKUP.sub("", text).split()).casefold().strip(" .,:()[]")
