"""The learning rate of a run, judged by its first step, and a suggestion."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from grpo.extras.preflight.first_step import FirstStep, Step

FAR = 1.0
"""KL in nats per token of a single step from which on the policy is destroyed."""
LITTLE = 1.0
"""Gain in nats, of all steps if each gained as much as the first one, below which greedy answers do not change."""
TOTAL, SAFE = 13.0, 0.02
"""Such a gain, and the KL in nats per token of the first step, that the suggested rate has at most."""
NEAR = 10.0
"""Factor within which a configured rate is not replaced: the suggestion itself may be off by 3."""
Report = dict[str, Any]


def too_far(step: Step) -> bool:
    """Return whether a step destroys the policy."""
    return step.kl is None or step.kl > FAR


def too_little(step: Step, steps: int) -> bool:
    """Return whether so many steps change too little for a greedy answer to become another."""
    return step.gain * steps < LITTLE and not too_far(step)


def suggested(steps: Sequence[Step], count: int) -> float | None:
    """Return the largest rate that is safe and no larger than `count` steps need; None without a line of rates."""
    safe = reaching(steps, [step.kl for step in steps], SAFE)
    enough = reaching(steps, [step.gain * count if step.kl is not None else None for step in steps], TOTAL)
    return min((rate for rate in (safe, enough) if rate), default=None)


def reaching(steps: Sequence[Step], values: Sequence[float | None], limit: float) -> float | None:
    """Return the rate at which a value of the steps reaches a limit first; None if it never does.

    Between two rates of the line logarithms are interpolated; where the next value is unknown, the rate before counts.
    """
    for (step, value), (larger, next_value) in pairwise(zip(steps, values, strict=True)):
        if not value or not 0 < value < limit:
            continue
        if next_value is None:
            return step.rate
        if next_value >= limit:
            part = math.log(limit / value) / math.log(next_value / value)
            return step.rate * (larger.rate / step.rate) ** part
    return None


def rates_of(first_step: FirstStep, configured: float, count: int) -> Report:
    """Return the part of the report about the learning rate.

    Args:
        configured: rate of the run.
        count: steps of the run.
    """
    return {
        "configured": configured,
        "suggested": suggested(first_step.steps, count),
        "steps": [{"rate": step.rate, "kl": step.kl, "gain": step.gain} for step in first_step.steps],
        "reason": first_step.reason,
    }


def suggestion(first_step: FirstStep, configured: float, count: int) -> list[Report]:
    """Return the suggestion of another rate, as the report has it; none if the configured rate is near enough."""
    rate = suggested(first_step.steps, count)
    if not rate or rate / NEAR <= configured <= rate * NEAR:
        return []
    effect = f"near the best for a run of {count} steps; train.learning_rate={configured:g} is far from it"
    return [{"overrides": [f"train.learning_rate={rate:.1g}"], "effect": effect}]
