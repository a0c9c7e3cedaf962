"""The rewards of correct completions, incorrect completions, and cheats of policies."""

import logging
import re
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from statistics import mean
from types import SimpleNamespace
from typing import Any

from rewards.isolation.loader import GROUP
from rewards.isolation.reward import Reward
from rewards.probing.probes import cheats, correct, incorrect
from rewards.text import text_of

AT_THE_END = SimpleNamespace(global_step=1, max_steps=1, epoch=1.0)
"""The trainer state that a reward reads in a check: the end of a run."""


@dataclass
class Probe:
    """Rewards of a kind of completion on rows of the data."""

    kind: str
    """`correct`, `incorrect` or `cheat`."""
    name: str
    """Style of a correct completion, or name of the change or the cheat."""
    rewards: list[float | None]
    """Reward on each row; None where the function gave none."""
    correct: list[float | None]
    """Reward of the correct completion of the same row."""
    too_much: list[int] = field(default_factory=list)
    """Indices of the rewards that are larger than they should be."""


def token_ids(text: str) -> list[int]:
    """Return substitutes for tokens, for rewards that count them: a number per word or sign, equal for equal words."""
    return [zlib.crc32(word.encode()) for word in re.findall(r"[\u3040-\u9fff]|\w{1,6}|[^\w\s]", text)]


def score(
    reward: Reward,
    rows: list[dict[str, Any]],
    completions: list[Any],
    tokenize: Callable[[str], list[int]] = token_ids,
    as_messages: bool = False,
) -> list[float | None]:
    """Return the rewards of a completion per row; texts become conversations with `as_messages`."""
    columns = {key: [row.get(key) for row in rows] for key in rows[0]} if rows else {}
    ids = [tokenize(text_of(completion)) for completion in completions]
    prompts = [row.get("prompt", row.get("question", "")) for row in rows]
    if as_messages:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
        completions = [[{"role": "assistant", "content": completion}] for completion in completions]
    arguments = {"prompts": prompts, "completions": completions, "completion_ids": ids, "trainer_state": AT_THE_END}
    arguments[GROUP] = [*range(len(rows))]  # each completion alone
    return reward.score(**{**columns, **arguments})


def fails(make: Callable[[], Reward], row: dict[str, Any], as_messages: bool = False) -> bool:
    """Return whether a reward fails on a correct completion, as text or as messages; silently."""
    logging.disable(logging.ERROR)
    try:
        with closing(make()) as reward:
            score(reward, [row], [next(iter(correct(row).values()))], as_messages=as_messages)
            return bool(reward.errors)
    finally:
        logging.disable(logging.NOTSET)


def try_out(reward: Reward, rows: list[dict[str, Any]], as_messages: bool = False) -> tuple[list[Probe], float]:
    """Return the rewards of each kind of completion, and the time per completion in seconds.

    An incorrect completion or a cheat should earn no more than the correct completion of the same row. It should earn
    less if the reward depends on correctness, that is if incorrect completions earn less on average.
    """
    started = time.perf_counter()
    right = [correct(row) for row in rows]
    styles = [style for style in right[0] if all(style in by_style for by_style in right)]
    if not styles:
        raise ValueError("some rows have a correct completion and others do not: give all of them one, or none")
    earned = {
        style: score(reward, rows, [by_style[style] for by_style in right], as_messages=as_messages) for style in styles
    }
    best = max(earned, key=lambda style: average(earned[style]))
    probes = [Probe("correct", style, earned[style], earned[style]) for style in styles]
    for kind, make in (("incorrect", incorrect), ("cheat", cheats)):
        by_row = [make(row, best) for row in rows]
        for name in dict.fromkeys(name for by_name in by_row for name in by_name):
            tried = [index for index, by_name in enumerate(by_row) if name in by_name]
            completions = [by_row[index][name] for index in tried]
            rewards = score(reward, [rows[index] for index in tried], completions, as_messages=as_messages)
            probes.append(Probe(kind, name, rewards, [earned[best][index] for index in tried]))
    averages = [average(probe.rewards) for probe in probes if probe.kind == "incorrect"]
    discriminates = bool(averages) and mean(averages) < average(earned[best]) - 1e-9
    for probe in probes[len(styles) :]:
        probe.too_much = above(probe.rewards, probe.correct, discriminates)
    return probes, (time.perf_counter() - started) / sum(len(probe.rewards) for probe in probes)


def above(earned: list[float | None], allowed: list[float | None], discriminates: bool) -> list[int]:
    """Return indices of rewards above those of correct completions, or equal if the reward `discriminates`."""
    margin = -1e-9 if discriminates else 1e-9
    pairs = enumerate(zip(earned, allowed, strict=True))
    return [row for row, (got, due) in pairs if got is not None and due is not None and got >= due + margin]


def average(earned: list[float | None]) -> float:
    """Return the mean of the rewards that are not None; minus infinity if all are."""
    return mean([reward for reward in earned if reward is not None] or [float("-inf")])
