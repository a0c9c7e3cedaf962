"""The problems of a run through its steps: how often each was asked, how well it was solved, and what was answered."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo.reporting.completions import PLACE, as_data, completion_of, files_of, number, problem, read_rows, shortened
from grpo.reporting.quotes import text_of

MOST = 400
"""Problems on a page: those that were asked most often."""
MAX_TIMES = 40
"""Steps per problem, spread from its first to its last."""
MAX_SIZE = 500_000
"""Bytes of the completions of problems on a page."""
LENGTH = 400
"""Characters of a completion."""
PROMPT = 1500
"""Characters of a prompt."""
SOLVED = 0.5
"""Accuracy from which on a problem is solved."""
Row = dict[str, Any]


def problems_of(run_dir: Path, weights: dict[str, float], grader: str, reused: bool) -> Row:
    """Return the `problems` that were asked at several logged steps, and how many `others` there were.

    Each has its `number`, a `name` and its `prompt`; how often it was `asked`; its `times`, each with the `step`, the
    `value`, which is its accuracy, or without a grader its mean reward (`measure`), the number of completions (`size`),
    and, for as many problems as a page holds, the `best` and the `worst` of them; the step at which it was first
    `solved`, when half of its completions were correct, and the one since which it is `forgotten`.

    Args:
        weights: of the rewards.
        grader: the reward that decides which completions are correct.
        reused: whether several steps learn from the same completions, so that these are logged more than once.
    """
    histories: dict[str, list[Row]] = defaultdict(list)
    prompts: dict[str, Any] = {}
    for file in files_of(run_dir / "completions"):
        rows = read_rows(file, ["step", "prompt", "thumbnails", "completion_tokens", *weights])
        for key, of_problem in groupby(rows, key=lambda row: repr(problem(row))):
            completions = list(of_problem)
            prompts.setdefault(key, completions[0]["prompt"])
            time = time_of(file, completions, weights, grader)
            if time and not (reused and histories[key] and histories[key][-1]["made"] == time["made"]):  # logged again
                histories[key].append(time)
    several = sorted((key for key, times in histories.items() if len(times) > 1), key=lambda key: -len(histories[key]))
    graded = grader in weights
    chosen = [problem_of(place, prompts[key], histories[key], graded) for place, key in enumerate(several[:MOST], 1)]
    add_completions(chosen, weights, grader)
    measure = "accuracy" if grader in weights else "reward"
    return {"problems": chosen, "measure": measure, "others": len(histories) - len(chosen)}


def time_of(file: Path, rows: Sequence[Row], weights: dict[str, float], grader: str) -> Row | None:
    """Return a step's completions of a problem; None if none of them has a reward."""
    rewards = [[number(row.get(name)) for name in weights] for row in rows]
    weighted = [
        sum(weights[name] * value for name, value in zip(weights, reward, strict=True) if value is not None)
        for reward in rewards
    ]
    known = [place for place, reward in enumerate(rewards) if any(value is not None for value in reward)]
    if grader in weights:
        graded = [number(row.get(grader)) for row in rows]
        values = [float(value >= 1) for value in graded if value is not None]
    else:
        values = [weighted[place] for place in known]
    if not values:
        return None
    ordered = sorted(known, key=lambda place: weighted[place])
    ends = {"best": rows[ordered[-1]][PLACE], "worst": rows[ordered[0]][PLACE]}
    fingerprint = (rewards, [row.get("completion_tokens") for row in rows])
    mean = number(sum(values) / len(values))
    return {"step": rows[0]["step"], "value": mean, "size": len(rows), "ends": ends, "made": fingerprint, "file": file}


def problem_of(place: int, asked: Any, times: list[Row], graded: bool) -> Row:
    """Return a problem for the page, given its place in the table, its prompt and its times."""
    prompt = shortened(asked)
    solved = next((time["step"] for time in times if time["value"] >= SOLVED), None) if graded else None
    forgotten = None
    if solved is not None and times[-1]["value"] < SOLVED:
        last = max(place for place, time in enumerate(times) if time["value"] >= SOLVED)
        forgotten = times[last + 1]["step"]
    name = " ".join(prompt.split())
    return {
        "number": place,
        "name": name if len(name) <= 90 else f"{name[:60]} … {name[-25:]}",
        "prompt": prompt[:PROMPT],
        "asked": len(times),
        "times": spread(times),
        "solved": solved,
        "forgotten": forgotten,
    }


def spread(times: list[Row]) -> list[Row]:
    """Return at most `MAX_TIMES` of them, the first and the last included."""
    if len(times) <= MAX_TIMES:
        return times
    return [times[round(place * (len(times) - 1) / (MAX_TIMES - 1))] for place in range(MAX_TIMES)]


def add_completions(problems: Iterable[Row], weights: dict[str, float], grader: str) -> None:
    """Add the best and the worst completion of each time, problem by problem, until a page is full."""
    size, tables = 0, dict[Path, list[Row]]()
    for time in (time for solved in problems for time in solved["times"]):
        file, ends = time.pop("file"), time.pop("ends")
        time.pop("made")
        if size > MAX_SIZE:
            continue
        if file not in tables:
            tables[file] = read_rows(file, ["completion", *weights])
        shown = {name: quoted(tables[file][row], weights, grader) for name, row in ends.items()}
        if ends["best"] == ends["worst"]:
            shown.pop("worst")
        size += len(as_data(shown).encode())
        time |= shown


def quoted(row: Row, weights: dict[str, float], grader: str) -> Row:
    """Return a completion in short: its place, reward and text, and whether it is correct."""
    completion = completion_of(row | {"advantage": math.nan}, weights, grader)
    return {key: completion[key] for key in ("row", "reward", "correct")} | {"text": text_of(completion)[:LENGTH]}
