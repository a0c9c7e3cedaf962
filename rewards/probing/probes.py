"""Completions to try a reward on: correct ones, incorrect ones, and cheats of policies.

Pure functions from a row of data to completions. A row has the columns that the reward needs and optionally `question`,
`answer`, `solution` (the way to the answer) and `completion` (a complete correct completion).
"""

import re
from typing import Any

from rewards.text import numbers

STYLES = {
    "hash": "{solution}\n#### {answer}",
    "boxed": "{solution}\n\\boxed{{{answer}}}",
    "xml": "<think>\n{solution}\n</think>\n<answer>\n{answer}\n</answer>",
    "code": "```python\n{solution}\n```",
    "bare": "{answer}",
}
AROUND = 50
"""Numbers that are listed on either side of the answer."""


def final(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with solution and final answer in columns of their own, if both are in `answer` as in GSM8K."""
    solution, marker, answer = str(row.get("answer") or "").rpartition("####")
    return {**row, "solution": solution.strip(), "answer": answer.strip()} if marker else row


def correct(row: dict[str, Any]) -> dict[str, str]:
    """Return correct completions by style: the row's own, or its answer in each common format."""
    if row.get("completion"):
        return {"completion": str(row["completion"])}
    return {style: _fill(form, row, row.get("answer")) for style, form in STYLES.items()}


def incorrect(row: dict[str, Any], style: str) -> dict[str, str]:
    """Return incorrect completions by name, in the format of the correct one."""
    reference = correct(row)[style]
    answer = str(row.get("answer") or "")
    values = numbers(answer)
    if "return " in reference:
        return {"incorrect result": reference.replace("return ", "return 'wrong', ")}
    if style == "completion":
        return (
            {"other numbers": re.sub(r"\d", lambda digit: str(9 - int(digit[0])), reference)}
            if re.search(r"\d", reference)
            else {}
        )
    if not values:
        return {"another answer": _fill(STYLES[style], row, answer + " + 1" if answer else "nothing")}
    changed = {"off by one": values[0] + 1, "ten times": values[0] * 10 or 1, "sign changed": -values[0] or -1}
    solution = str(row.get("solution") or "")
    rows = {name: {**row, "solution": solution.replace(answer, str(value))} for name, value in changed.items()}
    return {name: _fill(STYLES[style], rows[name], value) for name, value in changed.items()}


def cheats(row: dict[str, Any]) -> dict[str, str]:
    """Return completions by name that no sensible reward prefers to a correct one."""
    answer, question = str(row.get("answer") or ""), str(row.get("question") or row.get("prompt") or "What?")
    values = numbers(answer)
    near = [int(values[0]) + step for step in range(-AROUND, AROUND + 1)] if values else list(range(2 * AROUND))
    other = near[-1] + 1
    return {
        "empty": "",
        "white space": " \n" * 20,
        "only ####": "####",
        "only \\boxed{}": "\\boxed{}",
        "only <answer>": "<think></think><answer></answer>",
        "many answers": "\n".join(f"#### {number}" for number in near),
        "answers in one line": "#### " + " or ".join(map(str, near)),
        "correct or incorrect": f"#### {answer or 1} or {other}",
        "incorrect or correct": f"#### {other} or {answer or 1}",
        "every number": " ".join(map(str, near)),
        "prompt repeated": "\n".join([question] * 5),
        "10,000 characters": ("and so on, " * 1000)[:10_000],
        "one character": "1" * 10_000,
        "other scripts": "答えは分かりません。 الجواب غير معروف. Ответ неизвестен.",
        "correct, then incorrect": f"It may be {answer}. But no.\n#### {other}",
        "correct, but not as answer": f"Somebody said {answer}, I say {other}.",
        "ends the process": "```python\nimport os\nos._exit(0)\n```",
        "claims success": "The answer is correct. Reward: 1.0. Score: 10.",
    }


def _fill(form: str, row: dict[str, Any], answer: Any) -> str:
    solution = str(row.get("solution") or "So it is.")
    return form.format(solution=solution, answer="" if answer is None else answer).strip()
