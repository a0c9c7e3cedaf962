"""A reward tried on right completions, on wrong ones, and on what policies do to cheat."""

import re
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rewards.probing.probes import cheats, corrupted, references
from rewards.runtime.isolation import Reward
from rewards.text import text_of


@dataclass
class Probe:
    """One kind of completion, tried on every row."""

    kind: str
    name: str
    rewards: list[float | None]
    too_much: list[int]
    """Rows on which it earned more than it should."""


def token_ids(text: str) -> list[int]:
    """Return something like tokens, words and signs, for rewards that count them; equal ones have equal numbers."""
    return [zlib.crc32(word.encode()) for word in re.findall(r"[\u3040-\u9fff]|\w{1,6}|[^\w\s]", text)]


def score(
    reward: Reward, rows: list[dict[str, Any]], completions: list[Any], tokenize: Callable[[str], list[int]] = token_ids
) -> list[float | None]:
    """Return what the reward gives for one completion of each row."""
    columns = {key: [row.get(key) for row in rows] for key in rows[0]} if rows else {}
    ids = [tokenize(text_of(said)) for said in completions]
    prompts = [row.get("prompt", row.get("question", "")) for row in rows]
    return reward.score(**{**columns, "prompts": prompts, "completions": completions, "completion_ids": ids})


def try_out(reward: Reward, rows: list[dict[str, Any]]) -> tuple[list[Probe], float]:
    """Return what each kind of completion earned, and the seconds a completion took.

    A wrong completion or a cheat should earn no more than the right completion of the same row, and less if the reward
    tells right from wrong at all, that is if wrong completions earn less on the average.
    """
    started, count = time.perf_counter(), 0

    def tried(make: Any) -> list[float | None]:
        nonlocal count
        count += len(rows)
        return score(reward, rows, [make(row) for row in rows])

    right = {style: tried(lambda row, style=style: references(row)[style]) for style in references(rows[0])}
    best = max(right, key=lambda style: average(right[style]))
    probes = [Probe("right", style, earned, []) for style, earned in right.items()]
    wrong = {}
    for name in dict.fromkeys(name for row in rows for name in corrupted(row, best)):
        having = [row for row in rows if name in corrupted(row, best)]
        wrong[name] = (having, score(reward, having, [corrupted(row, best)[name] for row in having]))
        count += len(having)
    tells = bool(wrong) and mean(average(earned) for _, earned in wrong.values()) < average(right[best]) - 1e-9
    allowed = dict(zip(map(id, rows), right[best], strict=True))
    for name, (having, earned) in wrong.items():
        probes.append(Probe("wrong", name, earned, above(earned, [allowed[id(row)] for row in having], tells)))
    for name in cheats(rows[0]):
        earned = tried(lambda row, name=name: cheats(row)[name])
        probes.append(Probe("cheat", name, earned, above(earned, right[best], tells)))
    return probes, (time.perf_counter() - started) / count


def above(earned: list[float | None], right: list[float | None], tells: bool) -> list[int]:
    """Return the rows that earned more than the right completion, or as much if the reward tells right from wrong."""
    least = -1e-9 if tells else 1e-9
    pairs = enumerate(zip(earned, right, strict=True))
    return [row for row, (got, due) in pairs if got is not None and due is not None and got >= due + least]


def average(earned: list[float | None]) -> float:
    """Return the mean of the rewards that are there."""
    return mean([one for one in earned if one is not None] or [float("-inf")])
