"""1 for a completion that consists of the given XML elements, half for having each of them once, less for some."""

import re
from collections.abc import Sequence
from typing import Any

from rewards.text import text_of


def xml_format(completions: Sequence[Any], tags: Sequence[str] = ("think", "answer"), **columns: Any) -> list[float]:
    """Score the form of each completion, `<think>…</think> <answer>…</answer>` for the default tags.

    Returns:
        1.0 if the elements stand in this order, each once, none empty, with nothing around them; else half of the share
        of elements that are there once and not empty, so that there is a way towards the form.
    """
    whole = re.compile(r"\s*".join(rf"<{tag}>(?P<{tag}>.*?)</{tag}>" for tag in tags), re.DOTALL)
    return [_score(text_of(completion).strip(), tags, whole) for completion in completions]


def _score(text: str, tags: Sequence[str], whole: re.Pattern[str]) -> float:
    single = [text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags]
    filled = [bool(re.search(rf"<{tag}>.*?\S.*?</{tag}>", text, re.DOTALL)) for tag in tags]
    present = [once and content for once, content in zip(single, filled, strict=True)]
    if all(present) and whole.fullmatch(text):
        return 1.0
    return 0.5 * sum(present) / len(tags)
