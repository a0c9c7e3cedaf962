"""The text of completions, and their final answer."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.notation import LONGEST, NUMBER, WORDS, numbers, plain, signed, stated

BRACES = re.compile(r"(\\+(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
HASH = re.compile(r"####+[^\S\n]*(?:\n\s*)?((?:(?!####)[^\n])*)")
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)(?:</answer>|\Z)", re.DOTALL)
THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
SHORT = re.compile(rf"\A\s*(\S.{{0,{LONGEST}}}?)\s*\Z")
MARKED = ("hash", "boxed", "answer", "last_number")
"""Kinds of final answers with a mark in the text."""
HEADING = "heading"
"""The kind of text behind `####` with more text behind it, which is the answer if there is no other."""


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

    Thoughts, marks without content and headings behind `####` hold no answer.

    Args:
        find: kinds in the order of the search: `hash` is the text after `####` on its line or the next, `boxed` the
            content of `\boxed{}`, `answer` the content of `<answer></answer>`, `last_number` the last number or time,
            `text` all of a text of one short line.
    """
    return found_answer(text, find)[1]


def found_answer(text: str, find: Sequence[str] = MARKED) -> tuple[str, str]:
    """Return the kind of the final answer of a text, and the answer; both empty if there is none."""
    text = without_thoughts(text)
    for kind in (*find, *(HEADING for kind in find if kind == "hash")):
        answers = [answer for answer in map(str.strip, FINDERS[kind](text)) if answer]
        if answers:
            return kind, answers[-1]
    return "", ""


def without_thoughts(text: str) -> str:
    """Return what a text says outside of `<think></think>`, either of which may be missing."""
    return THOUGHT.sub("", text).rpartition("</think>")[2]


def final_part(text: str) -> str:
    """Return the last `<answer>…</answer>` outside of thoughts; without it, the text outside of thoughts."""
    visible = without_thoughts(text)
    answers = [part.partition("</answer>") for part in visible.split("<answer>")[1:]]
    closed = [answer for answer, end, _ in answers if end]
    return closed[-1] if closed else visible


def boxes(text: str) -> list[str]:
    r"""Return the contents of each `\boxed{}`, in the order of their beginnings; of one that never ends, the rest."""
    opened: list[int] = []
    ends: dict[int, int] = {}
    for brace in BRACES.finditer(text) if "box" in text else ():
        if brace[1]:
            ends[brace.end()] = brace.end() + LONGEST + 1  # more than an answer
        if brace[1] or brace[0] == "{":
            opened.append(brace.end())
        elif brace[0] == "}" and opened and (start := opened.pop()) in ends:
            ends[start] = brace.start()
    return [text[start:end] for start, end in ends.items()]


def behind_hashes(text: str) -> list[str]:
    """Return the answers behind `####`, not headings; of headings alone, the last if no text follows it."""
    lines = list(HASH.finditer(text))
    at_end = [line[1] for line in lines[-1:] if not text[line.end() :].strip()]
    return [line[1] for line in lines if line[1] and not is_heading(line[1])] or at_end


def is_heading(line: str) -> bool:
    """Return whether the text behind `####` may be a heading: words that state no answer."""
    says = "answer" in line.casefold() and bool(stated(line))
    return bool(WORDS.search(plain(line))) and not numbers(line) and not says


def last_number(text: str) -> list[str]:
    """Return the last number or time in a text, if there is one."""
    text = plain(text)
    last_digit = max(map(text.rfind, "0123456789"))
    return [signed(number) for number in list(NUMBER.finditer(text, max(0, last_digit - LONGEST)))[-1:]]


FINDERS: dict[str, Callable[[str], list[str]]] = {
    "hash": behind_hashes,
    "boxed": boxes,
    "answer": ANSWER.findall,
    "last_number": last_number,
    "text": SHORT.findall,
    HEADING: HASH.findall,
}
