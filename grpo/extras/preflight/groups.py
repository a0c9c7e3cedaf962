"""Groups with non-zero variance: their fraction by group size, and their completions per step and per second."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from omegaconf import DictConfig

from grpo.config.batch import processes
from grpo.extras.preflight.estimators import Array, Estimate, effective, non_zero_variance
from grpo.planning.advice import Planner
from grpo.planning.duration import Duration, expected_duration

SIZES = (2, 4, 8, 16, 32, 64)
NEAR = 0.9
"""Fraction of the highest rate from which on a smaller group is as good: it leaves more problems in a step."""
DRAWS = 400
"""Simulated steps of dynamic sampling."""
SMALLEST = 0.02
"""Fraction of completions whose time an update takes at least."""
Change = dict[str, str]


def filled(fraction: float, wanted: int, rounds: int) -> tuple[float, float]:
    """Return the fraction of a batch that dynamic sampling fills with groups of non-zero variance, and its generations.

    Simulated as `DynamicSampling.fill` works, each group by itself.

    Args:
        fraction: of groups with non-zero variance.
        wanted: groups in the batch.
        rounds: `rollout.max_rounds`.

    Returns:
        The mean fraction, and the mean number of groups generated per group of the batch.
    """
    random = np.random.default_rng(0)
    used = generated = 0
    for _ in range(DRAWS):
        teaching = groups = 0
        for _ in range(rounds):
            if teaching >= wanted:
                break
            number = min(wanted, math.ceil((wanted - teaching) / (teaching / groups if teaching else 1.0)))
            teaching += int(random.binomial(number, fraction))
            groups += number
        used, generated = used + min(teaching, wanted), generated + groups
    return used / (DRAWS * wanted), generated / (DRAWS * wanted)


@dataclass(frozen=True)
class Prospect:
    """The expected groups and completions per step with a setting."""

    change: Change
    """Overrides."""
    num_generations: int
    fraction: Estimate
    """Fraction of the groups of a step with non-zero variance."""
    completions: float
    """Expected completions per step in groups with non-zero variance."""
    groups: int
    """Groups per step."""
    seconds: float | None
    """Seconds per step; None if the plan has no time."""

    @property
    def effective(self) -> float:
        """These completions as independent ones: those of a group are alike."""
        return effective(self.completions, self.num_generations)

    @property
    def rate(self) -> float:
        """Effective completions per second; per step if the plan has no time."""
        return self.effective / (self.seconds or 1.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return {
            "num_generations": self.num_generations,
            "fraction": self.fraction.as_dict(),
            "groups_per_step": self.groups,
            "completions_per_step": self.completions,
            "effective_per_step": self.effective,
            "seconds_per_step": self.seconds,
            "effective_per_second": self.rate if self.seconds else None,
        }


class Prospects:
    """Compares settings of a command line; each setting has been checked and planned, and fits.

    Args:
        counts: (problems, outcomes), completions of each problem per total reward.
        planner: planner of the command line.
        enforce: whether a setting has to fit.
        ratios: measured by planned time of the phases, with the settings as they are.
        rewards: seconds of the rewards per step.
        lengths: mean tokens of prompts and of completions; None if they are not known.
    """

    def __init__(
        self,
        counts: Array,
        planner: Planner,
        enforce: bool,
        ratios: Mapping[str, float] | None = None,
        rewards: float = 0.0,
        lengths: tuple[float, float] | None = None,
    ) -> None:
        self.counts, self.planner, self.enforce = counts, planner, enforce
        self.ratios, self.rewards, self.lengths = ratios or {}, rewards, lengths
        self._fractions: dict[int, Estimate] = {}

    def fraction(self, size: int) -> Estimate:
        """Return the fraction of groups of so many completions with non-zero variance."""
        if size not in self._fractions:
            self._fractions[size] = non_zero_variance(self.counts, size)
        return self._fractions[size]

    def of(self, change: Change) -> Prospect | None:
        """Return the prospect with some overrides; None if the run refuses them, or does not fit."""
        plan = self.planner.plan(change)
        if plan is None or (plan.problem and self.enforce):
            return None
        config = self.planner.config(change)
        return self.prospect(change, config, expected_duration(config, plan, self.lengths))

    def prospect(self, change: Change, config: DictConfig, duration: Duration | None) -> Prospect:
        """Return the prospect of a configuration."""
        size, completions = config.train.num_generations, completions_per_step(config)
        groups = max(1, completions // size)
        fraction, generated = self.batch(config)
        updated = self.updated(config) / self.updated(self.planner.config({}))
        seconds = self.seconds(duration, generated, updated) if duration else None
        return Prospect(change, size, fraction, completions * fraction.value, groups, seconds)

    def batch(self, config: DictConfig) -> tuple[Estimate, float]:
        """Return the fraction of groups with non-zero variance in a batch, and groups generated per group of it."""
        fraction = self.fraction(config.train.num_generations)
        if not config.rollout.dynamic_sampling:
            return fraction, 1.0
        groups, rounds = max(1, completions_per_step(config) // config.train.num_generations), config.rollout.max_rounds
        value, generated = filled(fraction.value, groups, rounds)
        return Estimate(value, *(filled(end, groups, rounds)[0] for end in (fraction.low, fraction.high))), generated

    def updated(self, config: DictConfig) -> float:
        """Return the fraction of completions that the update computes; the others have no advantage."""
        train = config.train
        skips = config["update"].skip_zero_advantage and not train.beta and not train.get("entropy_coef")
        return max(self.batch(config)[0].value, SMALLEST) if skips else 1.0

    def seconds(self, duration: Duration, generated: float, updated: float) -> float:
        """Return the seconds of a step: the plan's, corrected by the ratio of measured to planned time.

        Args:
            duration: by the plan.
            generated: groups generated per group of the batch.
            updated: completions that the update computes, as a ratio to those with the settings as they are.
        """
        phases = {phase: planned * self.ratios.get(phase, 1.0) for phase, planned in duration.phases.items()}
        phases |= {"rewards": self.rewards, "update": phases["update"] * updated}
        return replace(duration, phases=phases).step + (generated - 1) * (phases["generation"] + self.rewards)

    def by_size(self, configured: int) -> list[tuple[int, Estimate, Prospect | None]]:
        """Return for each size of a group its fraction, without dynamic sampling, and its prospect if it can be run."""
        sizes = sorted({*SIZES, configured})
        return [(size, self.fraction(size), self.of({"train.num_generations": str(size)})) for size in sizes]


def best(prospects: Sequence[Prospect]) -> Prospect | None:
    """Return the smallest group size with nearly the highest rate; None if no group has non-zero variance."""
    highest = max((prospect.rate for prospect in prospects), default=0.0)
    if not highest:
        return None
    near = [prospect for prospect in prospects if prospect.rate >= NEAR * highest]
    return min(near, key=lambda prospect: prospect.num_generations)


def completions_per_step(config: DictConfig) -> int:
    """Return the completions of an optimizer step, of all processes."""
    train = config.train
    return train.per_device_train_batch_size * train.gradient_accumulation_steps * processes(config)
