"""Agreement of the LLM judge with a known ranking, alone and in comparison.

The completions of 24 problems of the built-in task are ranked by the distance of their answers from the correct one.
The judge is a function behind a server on this machine: it knows the distances, and has the faults that are measured.
"""

import json
import random
import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import combinations
from statistics import mean

from grpo.builtin.tasks.arithmetic import rows
from rewards.isolation.reward import Reward
from tests.judge_server import JudgeServer

PROBLEMS, SIZE = 24, 8
FRAME = re.compile(r"^(\w{16}) begin (\w{8})\n(.*?)\n\1 end \2$", re.MULTILINE | re.DOTALL)
ALONE = re.compile(r"^(\w{16})\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)
Fault = Callable[[list[float], random.Random], list[float]]
FAULTS: dict[str, Fault] = {
    "none": lambda scores, rng: scores,
    "all scores of a request up to 4 points higher or lower": lambda scores, rng: moved(scores, rng.uniform(-4, 4)),
    "3 points more for what stands first": lambda scores, rng: [scores[0] + 3, *scores[1:]],
    "noise with a deviation of 2 points": lambda scores, rng: [score + rng.gauss(0, 2) for score in scores],
}


def moved(scores: list[float], offset: float) -> list[float]:
    """Return scores that are all higher or lower."""
    return [score + offset for score in scores]


def judge(content: str, fault: Fault) -> str:
    """Return the reply of a judge with a fault, which follows from the question alone."""
    reference = int(re.findall(r"Reference answer: (-?\d+)", content)[0])
    names = [(name, text) for _, name, text in FRAME.findall(content)] or [("", ALONE.findall(content)[0][1])]
    distances = [abs(int(re.findall(r"-?\d+", text)[-1]) - reference) for _, text in names]
    found = fault([9 - distance for distance in distances], random.Random(content))
    scores = [round(min(10.0, max(0.0, score)), 1) for score in found]
    if not names[0][0]:
        return f"Score: {round(scores[0])}"
    return json.dumps({"scores": dict(zip((name for name, _ in names), scores, strict=True))})


def tau(scores: list[float], ranks: list[int]) -> float:
    """Return Kendall's tau of scores with a ranking, the best one first: 1 if they agree; equal scores count as 0."""
    signs = [(scores[a] > scores[b]) - (scores[a] < scores[b]) for a, b in combinations(range(len(ranks)), 2)]
    order = [1 if ranks[a] < ranks[b] else -1 for a, b in combinations(range(len(ranks)), 2)]
    return sum(sign * right for sign, right in zip(signs, order, strict=True)) / len(signs)


def measured() -> dict[str, dict[str, float]]:
    """Return the mean of Kendall's tau by fault, alone and in comparison."""
    problems = rows("train", PROBLEMS, seed=0)
    columns: dict[str, list] = {"prompts": [], "answer": [], "completions": [], "group_id": []}
    ranks = [list(range(SIZE)) for _ in problems]
    for group, problem in enumerate(problems):
        random.Random(group).shuffle(ranks[group])
        for rank in ranks[group]:
            sign = 1 if (group + rank) % 2 else -1
            columns["completions"].append(f"I count. #### {int(str(problem['answer'])) + sign * rank}")
            columns["prompts"].append(problem["question"])
            columns["answer"].append(problem["answer"])
            columns["group_id"].append(group)
    found: dict[str, dict[str, float]] = {}
    for name, fault in FAULTS.items():
        with JudgeServer(partial(judge, fault=fault)) as server:
            for way in ("alone", "in comparison"):
                kwargs = {"model": "scripted", "base_url": server.url, "compare": way != "alone"}
                with closing(Reward("rewards.judge.judge", "judge", kwargs)) as reward:
                    scores = reward.score(**columns)
                groups = [scores[start : start + SIZE] for start in range(0, len(scores), SIZE)]
                taus = [tau([score or 0.0 for score in group], of) for group, of in zip(groups, ranks, strict=True)]
                found.setdefault(name, {})[way] = round(mean(taus), 3)
    return found
