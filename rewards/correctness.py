"""1 for a completion whose final answer is the reference's, 0 for any other."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def final_answer(text: str) -> str:
    r"""Return what stands behind the last `####` on its line, else in the last `\boxed{}`, else the last number."""
    if "####" in text:
        return (text.rsplit("####", 1)[1].strip().splitlines() or [""])[0].strip()
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", text)
    if boxed:
        return boxed[-1].strip()
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def same(answer: str, reference: str) -> bool:
    """Whether two answers are equal as numbers (`1,000`, `$18.00`), or letter by letter if one is not a number."""
    try:
        return _number(answer) == _number(reference)
    except InvalidOperation:
        return answer == reference.strip()


def _number(text: str) -> Decimal:
    return Decimal(text.strip().rstrip(".").replace("$", "").replace(",", ""))


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Return the text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def correctness(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Compare each completion's final answer with the reference in the column `answer`; one reward a completion."""
    return [float(same(final_answer(text_of(c)), str(a))) for c, a in zip(completions, answer, strict=True)]
