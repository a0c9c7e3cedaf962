"""The learning rate of a run, judged by its first step, and a suggestion."""

from collections.abc import Sequence
from typing import Any

from grpo.extras.preflight.first_step import FirstStep, Step

FAR = 0.5
"""KL in nats per token of a single step from which on the policy is destroyed."""
LITTLE = 2.0
"""Gain in nats, of all steps if each gained as much as the first one, below which greedy answers do not change."""
TOTAL = 15.0
"""The gain of all steps that the suggested rate is to have at most."""
SAFE = 0.02
"""The KL in nats per token of its first step at most."""
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
    """Return the largest rate of a line that is safe and no larger than `count` steps need; None without a line."""
    safe = [step.rate for step in steps if step.kl is not None and step.kl <= SAFE and step.gain * count <= TOTAL]
    return max(safe, default=None)


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
    step = rate and first_step.at(rate)
    if not rate or not step or rate / NEAR <= configured <= rate * NEAR:
        return []
    effect = f"KL {step.kl:.2g} nats per token in the first step; {configured:g} is far from it"
    return [{"overrides": [f"train.learning_rate={rate:.1g}"], "effect": effect}]
