"""Answer held-out problems, greedily and by sampling, keep every completion, and say how many are right."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.estimators import majority_at_k, mean_interval, pass_at_k, wilson_interval
from rewards.isolation import Reward
from rewards.text import final_answer, numbers

Generate = Callable[[list[Any], float, int], list[str]]
"""From prompts, a temperature (0 is greedy) and a seed to completions."""


@dataclass(frozen=True)
class Decoding:
    """How completions are made."""

    max_new_tokens: int
    temperature: float = 1.0
    """Of the samples; the greedy completion has none."""
    samples: int = 0
    """Completions of each problem beside the greedy one."""
    seed: int = 0


@torch.no_grad()
def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[Any],
    length: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Continue each prompt, plain or conversational, by at most `length` tokens; with temperature 0 the likeliest."""
    if isinstance(prompts[0], str):
        inputs = tokenizer(text=prompts, padding=True, padding_side="left", return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
            return_tensors="pt",
            return_dict=True,
        )
    inputs = inputs.to(model.device)
    how: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature:
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    tokens = model.generate(**inputs, max_new_tokens=length, **how)
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def evaluate(
    generate: Generate,
    problems: Dataset,
    judge: Reward,
    decoding: Decoding,
    file: Path,
    batch_size: int,
    console: Console,
    difficulty: str | None = None,
    policy: str = "",
) -> dict[str, Any]:
    """Answer every problem and return how many answers are right.

    Args:
        problems: with the column `prompt` and what the judge needs.
        judge: gives 1 to a right completion; one that it fails on counts as wrong.
        file: gets a JSON line for each completion. Those in it that were made of the same prompts, with the same
            decoding and by the same policy, are not made again.
        difficulty: a column; accuracies are given for each of its values.
        policy: what tells this policy from others.

    Returns:
        `accuracy`, `correct`, `samples`, `interval` (95 %) of the greedy completions, `decoding`, and, where asked for,
        `pass@k` and `maj@k`, each with its interval, and `by_difficulty`.
    """
    answered = _answer_all(generate, problems, judge, decoding, file, batch_size, console, policy)
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
    if difficulty:
        result["by_difficulty"] = {}
        groups = defaultdict(list)
        for value, right in zip(problems[difficulty], greedy, strict=True):
            groups[value].append(right)
        for value in sorted(groups, key=lambda value: (str(type(value)), value)):
            right = groups[value]
            interval = wilson_interval(sum(right), len(right))
            result["by_difficulty"][str(value)] = {"accuracy": mean(right), "samples": len(right), "interval": interval}
    if judge.errors:
        result["judge_errors"] = dict(judge.errors)
    return result


def _of_samples(answered: Sequence[Sequence[dict[str, Any]]], samples: int) -> dict[str, Any]:
    """Return `pass@k` and `maj@k` for k = 1, 2, 4, … and all samples."""
    ks = [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]
    result: dict[str, Any] = {"pass@k": {}, "maj@k": {}}
    for k in ks:
        passes = [pass_at_k(samples, sum(row["correct"] for row in rows), k) for rows in answered]
        votes = [
            majority_at_k([_vote(row["final"]) for row in rows], [row["correct"] for row in rows], k)
            for rows in answered
        ]
        for name, values in (("pass@k", passes), ("maj@k", votes)):
            result[name][str(k)] = {"value": mean(values), "interval": mean_interval(values)}
    return result


def _vote(final: str) -> Any:
    """Return what is equal for final answers that mean the same."""
    values = numbers(final)
    return values[0] if values else " ".join(final.split()).casefold()


def _answer_all(
    generate: Generate,
    problems: Dataset,
    judge: Reward,
    decoding: Decoding,
    file: Path,
    batch_size: int,
    console: Console,
    policy: str,
) -> list[list[dict[str, Any]]]:
    """Return for each problem its greedy completion and then its samples, made now or found in `file`."""
    prompts = list(problems["prompt"])
    made_of = [policy, decoding.max_new_tokens, decoding.temperature, decoding.seed]
    keys = [
        [_digest([prompt, number, *(made_of if number else made_of[:2])]) for number in range(decoding.samples + 1)]
        for prompt in prompts
    ]
    known = _read(file)
    for temperature, samples in ((0.0, [0]), (decoding.temperature, range(1, decoding.samples + 1))):
        missing = [(row, number) for number in samples for row in range(len(prompts)) if keys[row][number] not in known]
        missing.sort(key=lambda one: len(str(prompts[one[0]])))  # batches of about equal length
        starts = range(0, len(missing), batch_size)
        what = "sampling answers" if temperature else "evaluating"
        for start in track(starts, what, console=console, transient=True, disable=not console.is_terminal):
            batch = missing[start : start + batch_size]
            rows = [row for row, _ in batch]
            texts = generate([prompts[row] for row in rows], temperature, decoding.seed + start)
            scores = _judged(judge, problems.select(rows), texts)
            lines = []
            for (row, number), text, score in zip(batch, texts, scores, strict=True):
                answer = {"completion": text, "final": final_answer(text), "score": score, "correct": score == 1}
                about = {"key": keys[row][number], "problem": row, "sample": number, "prompt": prompts[row]}
                known[keys[row][number]] = about | answer
                lines.append(json.dumps(about | answer, ensure_ascii=False) + "\n")
            with file.open("a") as out:
                out.write("".join(lines))
    return [[known[key] for key in of_problem] for of_problem in keys]


def _judged(judge: Reward, problems: Dataset, texts: list[str]) -> list[float | None]:
    """Score one completion of each problem, in the form in which rewards get them while training."""
    prompts = list(problems["prompt"])
    completions: list[Any] = texts
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: list(problems[name]) for name in problems.column_names if name not in ("prompt", "completion")}
    return judge.score(prompts=prompts, completions=completions, **columns)


def _digest(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Return the completions in a file by their keys; a line whose writing was interrupted is left out."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    if lines and not lines[-1].endswith("\n"):
        file.write_text("".join(lines[:-1]))
    return {row["key"]: row for row in rows}
