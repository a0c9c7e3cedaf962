"""Completions for the check of a reward: correct completions, incorrect completions, and cheats of policies.

Pure functions from a row of data to completions. A row has the columns that the reward needs and optionally `question`,
`answer`, `solution` (the way to the answer) and `completion` (a complete correct completion). The kind of the answer
determines the completions: a number, boxes, an option, or any other text.
"""

import re
from typing import Any

from rewards.notation import numbers
from rewards.probing import boxes

STYLES = {
    "hash": "{solution}\n#### {answer}",
    "boxed": "{solution}\n\\boxed{{{answer}}}",
    "xml": "<think>\n{solution}\n</think>\n<answer>\n{answer}\n</answer>",
    "code": "```python\n{solution}\n```",
    "bare": "{answer}",
}
FORMS = {**STYLES, "bbox_2d": "{solution}\n```json\n{answer}\n```", "box_start": "{solution}\n{answer}"}
LETTERS = "ABCDEFGHIJ"
AROUND = 50
"""Numbers that are listed on either side of the answer."""


def final(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with solution and final answer in columns of their own, if both are in `answer` as in GSM8K."""
    solution, marker, answer = str(row.get("answer") or "").rpartition("####")
    return {**row, "solution": solution.strip(), "answer": answer.strip()} if marker else row


def options_of(row: dict[str, Any]) -> list[str]:
    """Return the options of a row, as texts or letters as its answer is; none if the answer is neither."""
    answer, texts = str(row.get("answer") or ""), list(row.get("options") or [])
    letters = list(LETTERS[: len(texts) or max(4, LETTERS.find(answer) + 1)])
    options = letters if answer in letters else texts if answer in texts else []
    return options if len(options) > 1 else []


def correct(row: dict[str, Any]) -> dict[str, str]:
    """Return correct completions by style: the row's own, or its answer in each common format."""
    if row.get("completion"):
        return {"completion": str(row["completion"])}
    right = boxes.boxes_of(row)
    if right is None:
        return {style: _fill(style, row, row.get("answer")) for style in STYLES}
    return {style: _fill(style, row, boxes.written(row, right, style)) for style in (*STYLES, *boxes.styles(row))}


def incorrect(row: dict[str, Any], style: str) -> dict[str, str]:
    """Return incorrect completions by name, in the format of the correct completion."""
    reference = correct(row)[style]
    answer = str(row.get("answer") or "")
    if "return " in reference:
        return {"incorrect result": reference.replace("return ", "return 'wrong', ")}
    if style == "completion":
        other = re.sub(r"\d", lambda digit: str(9 - int(digit[0])), reference)
        return {"other numbers": other} if other != reference else {}
    if (right := boxes.boxes_of(row)) is not None:
        changes = boxes.changed(right).items()
        return {name: _fill(style, row, boxes.written(row, wrong, style)) for name, wrong in changes}
    if options_of(row):
        return {"another option": _fill(style, row, _near(row, style)[1])}
    values = numbers(answer)
    if not values:
        return {"another answer": _fill(style, row, answer + " + 1" if answer else "nothing")}
    changed = {"off by one": values[0] + 1, "ten times": values[0] * 10 or 1, "sign changed": -values[0] or -1}
    solution = str(row.get("solution") or "")
    rows = {name: {**row, "solution": solution.replace(answer, str(value))} for name, value in changed.items()}
    return {name: _fill(style, rows[name], value) for name, value in changed.items()}


def cheats(row: dict[str, Any], style: str = "bare") -> dict[str, str]:
    """Return completions that no sensible reward prefers to a correct one, by name; boxes and options in a style."""
    question = str(row.get("question") or row.get("prompt") or "What?")
    near, other = _near(row, style)
    answer = near[0] if boxes.boxes_of(row) is not None else str(row.get("answer") or "")
    return {
        "empty": "",
        "white space": " \n" * 20,
        "only ####": "####",
        "only \\boxed{}": "\\boxed{}",
        "only <answer>": "<think></think><answer></answer>",
        "many answers": "\n".join(f"#### {number}" for number in near),
        "answers in one line": "#### " + " or ".join(near),
        "correct or incorrect": f"#### {answer or 1} or {other}",
        "incorrect or correct": f"#### {other} or {answer or 1}",
        "every number": " ".join(near),
        "prompt repeated": "\n".join([question] * 5),
        "10,000 characters": ("and so on, " * 1000)[:10_000],
        "one character": "1" * 10_000,
        "other scripts": "答えは分かりません。 الجواب غير معروف. Ответ неизвестен.",
        "correct, then incorrect": f"It may be {answer}. But no.\n#### {other}",
        "correct, but not as answer": f"Somebody said {answer}, I say {other}.",
        "ends the process": "```python\nimport os\nos._exit(0)\n```",
        "claims success": "The answer is correct. Reward: 1.0. Score: 10.",
        **_cheats_of_kind(row, style),
    }


def _cheats_of_kind(row: dict[str, Any], style: str) -> dict[str, str]:
    """Return the cheats for boxes or options."""
    if (right := boxes.boxes_of(row)) is not None:
        style = "bbox_2d" if style == "completion" else style
        tricks = boxes.cheats(row, right).items()
        return {name: _fill(style, row, boxes.written(row, trick, style)) for name, trick in tricks}
    if not (options := options_of(row)):
        return {}
    style = "bare" if style == "completion" else style
    by_name = {"all options": _fill(style, row, ", ".join(options))}
    if row["answer"] != options[0]:
        by_name["always the first option"] = _fill(style, row, options[0])
    return by_name


def _near(row: dict[str, Any], style: str) -> tuple[list[str], str]:
    """Return answers of the same kind as the correct answer, including it, and an incorrect answer."""
    if (right := boxes.boxes_of(row)) is not None:
        near = [right, *(box[None] for box in boxes.hundred(row, right)[len(right) :])]
        other = boxes.changed(right)["moved by its size"]
        return [boxes.written(row, value, style) for value in near], boxes.written(row, other, style)
    if options := options_of(row):
        others = [option for option in options if option != row["answer"]]
        return [str(row["answer"]), *others], others[-1]
    values = numbers(str(row.get("answer") or ""))
    near = [int(values[0]) + step for step in range(-AROUND, AROUND + 1)] if values else list(range(2 * AROUND))
    return list(map(str, near)), str(near[-1] + 1)


def _fill(style: str, row: dict[str, Any], answer: Any) -> str:
    solution = str(row.get("solution") or "So it is.")
    return FORMS[style.partition(" ")[0]].format(solution=solution, answer="" if answer is None else answer).strip()
