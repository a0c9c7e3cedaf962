"""1 for a completion of exactly the given XML elements, 0.5 with each element once, less with some elements."""

import re
from collections.abc import Sequence
from typing import Any

from rewards.text import text_of


def xml_format(completions: Sequence[Any], tags: Sequence[str] = ("think", "answer"), **columns: Any) -> list[float]:
    """Score the format of each completion, `<think>…</think> <answer>…</answer>` for the default tags.

    Returns:
        1.0 for the elements in this order, each once, none empty, with nothing around them; else half of the fraction
        of elements that occur once and are not empty, so that partial success is rewarded. The first opening tag may
        be missing, because some chat templates write it into the prompt.
    """
    exact = re.compile(r"\s*".join(rf"<{tag}>(?P<{tag}>.*?)</{tag}>" for tag in tags), re.DOTALL)
    return [_score(text_of(completion).strip(), tags, exact) for completion in completions]


def _score(text: str, tags: Sequence[str], exact: re.Pattern[str]) -> float:
    first = f"<{tags[0]}>"
    text = text if first in text or f"</{tags[0]}>" not in text else first + text
    single = [tag for tag in tags if text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1]
    filled = [tag for tag in single if re.search(rf"<{tag}>.*?\S.*?</{tag}>", text, re.DOTALL)]
    return 1.0 if len(filled) == len(tags) and exact.fullmatch(text) else 0.5 * len(filled) / len(tags)
