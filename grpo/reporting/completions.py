"""The completions on the page of a run: of steps spread over the run, as many as a page can hold."""

import json
import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
from markupsafe import Markup
from pyarrow import parquet

from grpo.reporting.images import embed, named_boxes, names_of, reference_boxes
from grpo.reporting.tokens import tokens_of

MAX_STEPS = 60
"""Steps on a page."""
MAX_LENGTH = 6000
"""Characters per text; of a longer one the page shows beginning and end."""
ANSWER = 500
"""Characters of a reference answer."""
MAX_SIZE = 2_200_000
"""Bytes of text on a page."""
COLUMNS = (
    *("step", "prompt", "completion", "completion_id", "advantage"),
    *("thumbnails", "image_sizes", "shown_sizes", "answer"),
)
"""Columns of a file of completions that the page shows, beside those of the rewards."""
LENGTH = ("completion_tokens", "truncated")
"""Columns of the trainer: the tokens of a completion, and whether it did not end by itself."""
PLACE = "/place"
"""Key of the place of a row in its file; no column is called so."""
PER_TOKEN = "/values"
"""Key of the values per token of a row, as of `tokens_of`."""
FAILED = re.compile(r"\W*error\b", re.IGNORECASE)
"""Beginning of the result of a tool call that has failed."""


def sample(run_dir: Path, weights: dict[str, float], grader: str, coordinates: str = "original") -> dict[str, Any]:
    """Return `steps`, each with the groups of its completions, and the numbers of `shown` and `logged` steps.

    A group has its prompt and its completions, the highest reward first, as of `completion_of`. A step that is too
    large is reduced to its first groups, or to the best and the worst completion of the first one. There are also the
    name of the `grader`, the `images` and the number of `missing` ones, and whether any completion has `boxes` to draw
    or `tokens` with values.

    Args:
        run_dir: of the run.
        weights: of the rewards.
        grader: the reward that decides which completions are correct.
        coordinates: of boxes in completions, a key of `rewards.boxes.COORDINATES`.
    """
    folder = run_dir / "completions"
    files = files_of(folder)
    count = min(MAX_STEPS, len(files))
    chosen = [files[round(place * (len(files) - 1) / max(1, count - 1))] for place in range(count)]
    steps = []
    for file in chosen:
        rows = read_rows(file, [*COLUMNS, *LENGTH, *weights])
        if any(row.get("completion_id") is not None for row in rows):
            tokens = tokens_of(file)
            rows = [row | {PER_TOKEN: tokens.get(row["completion_id"])} for row in rows]
        of_problems = [list(of_problem) for _, of_problem in groupby(rows, key=problem)]
        groups = [group(of_problem, weights, grader, coordinates) for of_problem in of_problems]
        if rows:
            fit = fitting(groups, MAX_SIZE // len(chosen))
            steps.append({"step": rows[0]["step"], "rows": len(rows), "groups": fit})
    boxes = any("boxes" in candidate for step in steps for candidate in step["groups"])
    embedded = embed(steps, folder / "images")
    valued = any("values" in row for step in steps for group in step["groups"] for row in group["completions"])
    content = {"steps": steps, "shown": len(steps), "logged": len(files), "grader": grader}
    return content | {"boxes": boxes, "tokens": valued, **embedded}


def files_of(folder: Path) -> list[Path]:
    """Return the files of completions in a folder, by their steps."""
    return sorted(folder.glob("completions_*.parquet"), key=lambda file: (len(file.name), file.name))


def problem(row: dict[str, Any]) -> tuple[Any, Any]:
    """Return what tells the problem of a row from others: its prompt and its images."""
    return row["prompt"], row.get("thumbnails")


def read_rows(file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a Parquet file with the columns of `names` that it has; invalid UTF-8 is replaced.

    A file that a run was killed while it wrote has none.
    """
    try:
        with parquet.ParquetFile(file) as opened:
            table = opened.read([name for name in names if name in opened.schema_arrow.names])
    except (pyarrow.ArrowInvalid, OSError):
        return []
    columns = {}
    for name in names:
        if name in table.column_names:
            column = table[name]
            if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                cells = column.cast(pyarrow.large_binary()).to_pylist()
                columns[name] = [cell.decode(errors="replace") for cell in cells]
            else:
                columns[name] = column.to_pylist()
    rows = zip(*columns.values(), strict=True)
    return [{PLACE: place, **dict(zip(columns, row, strict=True))} for place, row in enumerate(rows)]


def group(
    rows: Sequence[dict[str, Any]], weights: dict[str, float], grader: str, coordinates: str = "original"
) -> dict[str, Any]:
    """Return a prompt and its completions, the highest reward first; one without a reward comes last.

    A problem with a reference answer has this `answer`. A prompt with images has their files; one that asks for boxes
    has the correct ones, and its completions theirs.
    """
    files = names_of(rows[0].get("thumbnails"))
    boxes = reference_boxes(rows[0]) if files else []
    completions: list[dict[str, Any]] = []
    for row in rows:
        completions.append(completion_of(row, weights, grader))
        if boxes:
            completions[-1] |= dict(zip(("boxes", "named"), named_boxes(row, coordinates), strict=True))
    completions.sort(key=lambda row: -math.inf if row["reward"] is None else row["reward"], reverse=True)
    content = {"prompt": shortened(rows[0]["prompt"]), "size": len(completions), "completions": completions}
    if (answer := rows[0].get("answer")) is not None:
        content["answer"] = shortened(str(answer))[:ANSWER]
    return content | ({"images": files} if files else {}) | ({"boxes": boxes} if boxes else {})


def completion_of(row: dict[str, Any], weights: dict[str, float], grader: str) -> dict[str, Any]:
    """Return a row of a file of completions for the page.

    It has the `text` or the `turns` of the completion, its place (`row`), its weighted `reward`, the value of each
    reward function (`rewards`) and its `advantage`; whether it is `correct`, None if the grader was no reward of the
    run or gave none; whether a call of a tool has `failed`; and, where they are known, its length in `tokens`, whether
    it was `truncated`, and `values` per token.
    """
    rewards = {name: number(row.get(name)) for name in weights}
    weighted = [weights[name] * value for name, value in rewards.items() if value is not None]
    graded = rewards.get(grader)
    content = said(row["completion"]) | {
        "row": row[PLACE],
        "reward": number(sum(weighted)) if weighted else None,
        "rewards": rewards,
        "advantage": number(row.get("advantage")),
        "correct": None if graded is None else graded >= 1,
    }
    results = (turn["text"] for turn in content.get("turns", ()) if turn["who"] == "tool")
    content["failed"] = any(FAILED.match(text) for text in results)
    content |= {name: row[name] for name in LENGTH if row.get(name) is not None}
    return content | ({"values": row[PER_TOKEN]} if row.get(PER_TOKEN) else {})


def said(completion: Any) -> dict[str, Any]:
    """Return the `text` of a completion; of a conversation with tools its `turns`, each with who spoke and what."""
    if not isinstance(completion, list) or not (len(completion) > 1 or completion[0].get("tool_calls")):
        return {"text": shortened(completion)}
    turns = []
    for message in completion:
        if text := str(text_of_parts(message["content"]) or ""):
            turns.append({"who": "tool" if message["role"] == "tool" else "policy", "text": shortened(text)})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            turns.append({"who": "call", "text": shortened(f"{function['name']}({listed(function['arguments'])})")})
    return {"turns": turns}


def listed(arguments: str) -> str:
    """Return the arguments of a call as Python writes them; those that are no JSON object as they are."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return ", ".join(f"{name}={value!r}" for name, value in parsed.items()) if isinstance(parsed, dict) else arguments


def number(value: float | None) -> float | None:
    """Return a number with four significant digits; None for one that is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def fitting(groups: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    """Return the first groups, of at most `size` bytes in total, and at least best and worst of the first group."""
    chosen: list[dict[str, Any]] = []
    for candidate in groups:
        size -= len(as_data(candidate).encode())
        if size < 0:
            break
        chosen.append(candidate)
    if not chosen and groups:
        ordered = groups[0]["completions"]
        chosen = [{**groups[0], "completions": [ordered[0], ordered[-1]] if len(ordered) > 1 else ordered}]
    return chosen


def as_data(content: Any) -> Markup:
    """Return JSON that is safe anywhere in a page: no character in it begins or ends markup."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def shortened(content: Any) -> str:
    """Return a text, or the messages of a conversation, as valid UTF-8; the middle of a long text is omitted."""
    if isinstance(content, list):
        texts = [text_of_parts(message["content"]) for message in content]
        messages = [f"{message['role']}: {text}" for message, text in zip(content, texts, strict=True)]
        content = texts[0] if len(content) == 1 else "\n".join(messages)
    text = str(content)
    if len(text) > MAX_LENGTH:
        omitted = len(text) - MAX_LENGTH
        text = f"{text[: MAX_LENGTH * 2 // 3]}\n[… {omitted} characters omitted …]\n{text[-MAX_LENGTH // 3 :]}"
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def text_of_parts(content: Any) -> Any:
    """Return the content of a message: of a list of parts their texts, and a mark for each image."""
    if not isinstance(content, list):
        return content
    return " ".join("[image]" if part["type"] == "image" else str(part.get("text")) for part in content)
