"""Answer held-out problems, greedily and by sampling, keep every completion, and compute the accuracy."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.progress import track

from grpo.data.task import reward_columns
from grpo.generation.transformers.completer import Generate
from grpo.rundir.files import read_lines, write_lines
from grpo.utils.distributed import gathered, is_main_process, rank, world_size
from grpo.utils.estimators import majority_at_k, pass_at_k, wilson_interval
from grpo.view.images import COLUMN, names, prompt_of
from rewards.isolation.reward import Reward
from rewards.notation import numbers
from rewards.text import final_answer

GRADED_AT_ONCE = 64
"""Completions per call of the grader."""


@dataclass(frozen=True)
class Decoding:
    """Settings of generation in an evaluation."""

    max_new_tokens: int
    """Length of the longest completion, tokens."""
    temperature: float = 1.0
    """Temperature of the samples; the greedy completion has none."""
    samples: int = 0
    """Number of sampled completions per problem, in addition to the greedy completion."""
    seed: int = 0
    """Seed of the samples; each completion derives its own from it."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: held-out problems, the sampling of answers, the grader and the file of completions."""

    problems: Dataset
    """With the column `prompt` and the columns that the grader needs."""
    grader: Reward
    """Gives 1 to a correct completion; a completion on which it fails counts as incorrect."""
    decoding: Decoding
    file: Path
    """Gets a JSON line per completion. Completions in it of the same prompt, decoding and policy are reused and graded
    again."""
    batch_size: int
    """Completions that are generated at once."""
    console: Console
    difficulty: str | None = None
    """Column; accuracy is also reported for each of its values."""
    policy: str = ""
    """Fingerprint of the policy."""
    asked: Callable[[dict[str, Any]], Any] = prompt_of
    """From a row of the problems to the prompt that is generated for."""

    @property
    def own_file(self) -> Path:
        """File of this process's completions until all are in `file`; rank 0 writes into `file` itself."""
        file = self.file
        return file if is_main_process() else file.with_name(f"{file.stem}.{rank()}{file.suffix}")


def evaluate(generate: Generate, evaluation: Evaluation) -> dict[str, Any]:
    """Answer every problem and return the accuracy.

    Returns:
        `accuracy`, `correct`, `samples`, `interval` (95 %) of the greedy completions, `decoding`, with samples `pass@k`
        and `maj@k`, each with its interval, with `difficulty` `by_difficulty`, and `grader_errors` if there are any.
    """
    decoding = evaluation.decoding
    answered, errors = _answered_by_all(generate, evaluation)
    greedy = [rows[0]["correct"] for rows in answered]
    result: dict[str, Any] = {
        "accuracy": mean(greedy),
        "correct": sum(greedy),
        "samples": len(greedy),
        "interval": wilson_interval(sum(greedy), len(greedy)),
        "decoding": {"do_sample": False, "max_new_tokens": decoding.max_new_tokens},
    }
    if decoding.samples:
        result["sampling"] = asdict(decoding)
        result |= _of_samples([rows[1:] for rows in answered], decoding.samples)
    if evaluation.difficulty:
        result["by_difficulty"] = _by_difficulty(list(evaluation.problems[evaluation.difficulty]), greedy)
    if errors:
        result["grader_errors"] = dict(errors)
    return result


def _answered_by_all(generate: Generate, evaluation: Evaluation) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
    """Return the graded completions of each problem, and the errors of the grader; each process grades a part.

    Sharded weights need all processes for each batch, so all processes get the same number of problems: the last
    problem repeats.
    """
    problems, grader, file = evaluation.problems, evaluation.grader, evaluation.file
    before = grader.errors.copy()
    each = -(-len(problems) // world_size())
    mine = problems.select([min(each * rank() + row, len(problems) - 1) for row in range(each)])
    answered = _answer_all(generate, replace(evaluation, problems=mine))
    answered = answered[: max(0, len(problems) - each * rank())]
    _grade_all(grader, mine, answered)
    answered = gathered(answered)
    if is_main_process():
        rows = [{**row, "problem": problem} for problem, rows in enumerate(answered) for row in rows]
        write_lines(file, list((_read(file) | {row["key"]: row for row in rows}).values()))
    else:
        evaluation.own_file.unlink(missing_ok=True)
    return answered, sum(gathered([grader.errors - before]), Counter())


def _by_difficulty(difficulties: list[Any], correct: list[bool]) -> dict[str, dict[str, Any]]:
    """Return accuracy, samples and interval of the problems of each difficulty."""
    groups = defaultdict(list)
    for value, is_correct in zip(difficulties, correct, strict=True):
        plain = isinstance(value, int | float | str) and value == value
        groups[value if plain else str(value)].append(is_correct)
    return {
        str(value): {
            "accuracy": mean(groups[value]),
            "samples": len(groups[value]),
            "interval": wilson_interval(sum(groups[value]), len(groups[value])),
        }
        for value in sorted(groups, key=lambda value: (str(type(value)), value))
    }


def _of_samples(answered: Sequence[Sequence[dict[str, Any]]], samples: int) -> dict[str, Any]:
    """Return `pass@k` and `maj@k` for k = 1, 2, 4, … and all samples.

    There is no majority if a completion can be correct without a final answer, such as code.
    """
    ks = [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
    result: dict[str, Any] = {"pass@k": {}}
    if all(row["final"] for rows in answered for row in rows if row["correct"]):
        result["maj@k"] = {}
    for k in ks:
        passes = [pass_at_k(samples, sum(row["correct"] for row in rows), k) for rows in answered]
        votes = [
            majority_at_k([_vote(row["final"]) for row in rows], [row["correct"] for row in rows], k)
            for rows in answered
        ]
        for name, values in (("pass@k", passes), ("maj@k", votes)):
            if name in result:
                interval = wilson_interval(sum(values), len(values))
                result[name][str(k)] = {"value": mean(values), "interval": interval}
    return result


def _vote(final: str) -> Any:
    """Return a value that is equal for equivalent final answers: a number, else the text in lower case."""
    values = numbers(final)
    return values[0] if values else " ".join(final.split()).casefold()


def _answer_all(generate: Generate, evaluation: Evaluation) -> list[list[dict[str, Any]]]:
    """Return the greedy completion and then the samples of each problem, generated now or found in the file."""
    problems, decoding, file = evaluation.problems, evaluation.decoding, evaluation.own_file
    batch_size, console = evaluation.batch_size, evaluation.console
    origin = [evaluation.policy, decoding.max_new_tokens, decoding.temperature, decoding.seed]
    prompts = list(problems["prompt"])
    shown = names(problems) if COLUMN in problems.column_names else [[]] * len(prompts)
    keys = [
        [_digest([*question, number, *(origin if number else origin[:2])]) for number in range(decoding.samples + 1)]
        for question in ([prompt, *images] for prompt, images in zip(prompts, shown, strict=True))
    ]
    known = _read(file)
    for temperature, samples in ((0.0, [0]), (decoding.temperature, range(1, decoding.samples + 1))):
        missing = [(row, number) for number in samples for row in range(len(prompts)) if keys[row][number] not in known]
        # batches of about equal length, with the samples of a problem together, which then read its prompt once
        missing.sort(key=lambda pair: (len(str(prompts[pair[0]])), *pair))
        starts = range(0, len(missing), batch_size)
        activity = "sampling answers" if temperature else "evaluating"
        for start in track(starts, activity, console=console, transient=True, disable=not console.is_terminal):
            batch = missing[start : start + batch_size]
            batch_keys = [keys[row][number] for row, number in batch]
            seeds = [int(key[:7], 16) for key in batch_keys]  # of the key, so that no two batches share them
            texts = generate([evaluation.asked(problems[row]) for row, _ in batch], temperature, seeds)
            generated = [
                {"key": key, "problem": row, "sample": number, "prompt": prompts[row], "completion": text}
                for key, (row, number), text in zip(batch_keys, batch, texts, strict=True)
            ]
            with file.open("a") as out:
                out.write("".join(json.dumps(line) + "\n" for line in generated))
            known |= {line["key"]: line for line in generated}
    return [[dict(known[key]) for key in of_problem] for of_problem in keys]


def _grade_all(grader: Reward, problems: Dataset, answered: list[list[dict[str, Any]]]) -> None:
    """Add to each completion its `final` answer, its `score` and whether it is `correct`.

    The grader gets completions in the same form as rewards in training.
    """
    names = [name for name in reward_columns(problems) if name not in ("prompt", "completion")]
    columns = {name: list(problems[name]) for name in names}
    completed = [(problem, row) for problem, rows in enumerate(answered) for row in rows]
    for start in range(0, len(completed), GRADED_AT_ONCE):
        batch = completed[start : start + GRADED_AT_ONCE]
        prompts = [row["prompt"] for _, row in batch]
        completions: list[Any] = [row["completion"] for _, row in batch]
        if not isinstance(prompts[0], str):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        batch_columns = {name: [values[problem] for problem, _ in batch] for name, values in columns.items()}
        scores = grader.score(prompts=prompts, completions=completions, **batch_columns)
        for (_, row), score in zip(batch, scores, strict=True):
            row |= {"final": final_answer(row["completion"]), "score": score, "correct": score == 1}


def _digest(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the completions in a file by their keys; lines that were not written completely are removed."""
    rows = read_lines(file)
    if file.exists():
        write_lines(file, rows)
    return {row["key"]: row for row in rows}
