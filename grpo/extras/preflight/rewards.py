"""Rewards and accuracy in the samples: means, spread, failures, contradictions, the problems where rewards disagree."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from grpo.extras.preflight.estimators import Estimate, Z, mean_of_problems, pass_at, proportion
from grpo.extras.preflight.samples import Sample, Sampled

Array = np.ndarray
KS = (1, 2, 4, 8, 16, 32, 64)
SHOWN = 10
"""Number of problems with the largest disagreement of rewards."""


def total(sample: Sample, weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of the rewards of a completion as TRL adds them up, in single precision; None without."""
    pairs = [(value, weights[name]) for name, value in sample.rewards.items() if value is not None]
    if not pairs:
        return None
    values, factors = (np.array(part, dtype=np.float32) for part in zip(*pairs, strict=True))
    return float((values * factors).sum())


def outcome(sample: Sample, weights: Mapping[str, float], aggregation: str) -> object:
    """Return a key that is equal for completions with equal advantages; None for a completion without any reward.

    Args:
        aggregation: TRL's `multi_objective_aggregation`: equality of the sum of the rewards, or of each reward.
    """
    summed = total(sample, weights)
    if summed is None or aggregation == "sum_then_normalize":
        return summed
    return tuple(sample.rewards.items())


def outcomes(problems: Sequence[Sampled], weights: Mapping[str, float], aggregation: str) -> list[list[object]]:
    """Return the outcomes of each problem's completions, without those that have no reward."""
    rows = [[outcome(completion, weights, aggregation) for completion in problem.completions] for problem in problems]
    return [[value for value in of_problem if value is not None] for of_problem in rows]


def pass_rates(correct: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Return pass@k by k, given which completions of each problem are correct."""
    counts = np.array([[len(row) - sum(row), sum(row)] for row in correct])
    return {str(k): pass_at(counts, k).as_dict() for k in KS}


def accuracy(problems: Sequence[Sampled]) -> dict[str, Any] | None:
    """Return the fraction of correct completions, with pass@k, of those that were graded; None without any."""
    graded = [
        [completion.correct for completion in problem.completions if completion.correct is not None]
        for problem in problems
    ]
    correct = [row for row in graded if row]
    if not correct:
        return None
    return proportion([fmean(row) for row in correct]).as_dict() | {"pass@k": pass_rates(correct)}


def of_each(problems: Sequence[Sampled]) -> dict[str, dict[str, Any]]:
    """Return of each reward its `mean`, `spread` (standard deviation), range, `failed` and `varies`; pass@k of 0 and 1.

    `varies` is the fraction of problems with different values among their completions.
    """
    names = problems[0].completions[0].rewards
    by_name = {}
    for name in names:
        values = [[completion.rewards[name] for completion in problem.completions] for problem in problems]
        scored = [[value for value in row if value is not None] for row in values]
        known = [row for row in scored if row]
        failed = [fmean(name in completion.failed for completion in problem.completions) for problem in problems]
        of_name: dict[str, Any] = {"failed": proportion(failed).as_dict(), "mean": None, "spread": None, "varies": 0.0}
        if known:
            every = [value for row in known for value in row]
            of_name |= {
                "mean": mean_of_problems([fmean(row) for row in known]).as_dict(),
                "spread": float(np.std(every)),
                "lowest": min(every),
                "highest": max(every),
                "varies": fmean(len(set(row)) > 1 for row in known),
            }
            if set(every) <= {0.0, 1.0} and len(every) == sum(map(len, values)):
                of_name["pass@k"] = pass_rates([[value == 1 for value in row] for row in known])
        by_name[name] = of_name
    return by_name


def correlation(pairs: Sequence[Sequence[tuple[float, float]]]) -> Estimate | None:
    """Return the correlation of two values within problems; None if a value never varies.

    It subtracts the mean of each problem, like advantages. The interval uses R. A. Fisher's transformation (1921), with
    a degree of freedom less per problem.

    Args:
        pairs: both values of each completion, by problem.
    """
    rows = [np.array(row, dtype=float) for row in pairs if len(row) > 1]
    if not rows:
        return None
    both = np.concatenate([row - row.mean(0) for row in rows])
    sizes = (both**2).sum(0)
    if sizes.min() <= 1e-12:
        return None
    value = float((both[:, 0] * both[:, 1]).sum() / math.sqrt(sizes.prod()))
    freedom = len(both) - len(rows) - 2
    if freedom < 1:
        return Estimate(value, -1.0, 1.0)
    middle, spread = math.atanh(max(-0.999999, min(0.999999, value))), Z / math.sqrt(freedom)
    return Estimate(value, math.tanh(middle - spread), math.tanh(middle + spread))


def pairs_of(problems: Sequence[Sampled], name: str, other: str) -> list[list[tuple[float, float]]]:
    """Return the values of two rewards on the completions that have both, by problem."""
    rows = [[(sample.rewards[name], sample.rewards[other]) for sample in problem.completions] for problem in problems]
    return [[(a, b) for a, b in row if a is not None and b is not None] for row in rows]


def contradictions(problems: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Return the pairs of rewards whose correlation within problems is below 0, interval included."""
    opposed = []
    for name, other in combinations(problems[0].completions[0].rewards, 2):
        estimate = correlation(pairs_of(problems, name, other))
        if estimate and estimate.high < 0:
            opposed.append({"rewards": [name, other], "correlation": estimate.as_dict()})
    return opposed


def disagreements(problems: Sequence[Sampled]) -> list[dict[str, Any]]:
    """Return the problems with the largest disagreement of rewards: `problem`, `prompt`, and the distance, 0 to 1.

    Each reward that varies is scaled from its lowest to its highest value; a completion's disagreement is the range of
    its scaled rewards, a problem's the mean of its completions'.
    """
    names, scaled = list(problems[0].completions[0].rewards), {}
    for name in names:
        known = [
            v
            for problem in problems
            for completion in problem.completions
            if (v := completion.rewards[name]) is not None
        ]
        if known and max(known) > min(known):
            scaled[name] = (min(known), max(known) - min(known))
    if len(scaled) < 2:
        return []

    def apart(sample: Sample) -> float:
        values = [(v - low) / size for name, (low, size) in scaled.items() if (v := sample.rewards[name]) is not None]
        return max(values) - min(values) if values else 0.0

    distances = [(fmean(apart(completion) for completion in problem.completions), problem) for problem in problems]
    distances.sort(key=lambda scored: -scored[0])
    return [{"problem": p.problem, "prompt": p.prompt, "apart": value} for value, p in distances[:SHOWN] if value > 0]
