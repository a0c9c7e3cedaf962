"""Whether a run will learn, in a line, and the changes that give more groups with non-zero variance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from grpo.extras.preflight.estimators import Estimate
from grpo.extras.preflight.first_step import Step
from grpo.extras.preflight.groups import NEAR, SIZES, Prospect, Prospects
from grpo.extras.preflight.learning_rate import too_far, too_little

FEW = 0.02
"""Fraction of groups with non-zero variance below which a run probably does not learn."""
SLOW = 0.2
"""Below which it learns slowly."""
ENOUGH = 0.5
"""From which on nothing is suggested."""
BETTER = 1.25
"""Times as many groups with non-zero variance that a suggestion has to give."""
TRUNCATED = 0.9
"""Fraction of truncated, masked completions above which a run probably does not learn."""
NOTED = 0.5
"""From which on the verdict mentions them."""
UNRELATED = 0.1
"""Correlation with correctness that rewards without the grader surely exceed if they are about the task."""
IN_ALL = 10
"""Groups with non-zero variance in all steps below which a run is too short to learn."""
MAX_SUGGESTIONS = 2


@dataclass(frozen=True)
class Evidence:
    """The facts of the samples on which a verdict depends."""

    now: Prospect
    """With the settings as they are."""
    steps: int
    rewards: Mapping[str, Mapping[str, Any]]
    """As of `grpo.extras.preflight.rewards.of_each`."""
    accuracy: float | None = None
    """None without a grader."""
    truncated: float = 0.0
    """Fraction of completions."""
    masked: bool = False
    """Whether the loss leaves truncated completions out."""
    grader: str | None = None
    """Name of the grader, if it is one of the rewards."""
    agreement: Estimate | None = None
    """Correlation of the total reward with correctness within problems; None if a value never varies."""
    rate: float = 1e-5
    """Learning rate."""
    first_step: Step | None = None
    """The first step with that rate; None if it was not tried."""


@dataclass
class Verdict:
    """The forecast."""

    learns: bool
    reason: str
    """One line."""
    lacks_groups: bool = False
    """Whether more groups with non-zero variance would help."""
    suggestions: list[dict[str, Any]] = field(default_factory=list)
    """Each with `overrides`, the `fraction` of groups with non-zero variance, and `effect`."""

    def __str__(self) -> str:
        advice = [
            f"{' '.join(suggestion['overrides'])} gives {percent(suggestion['fraction'])}"
            for suggestion in self.suggestions[:1]
            if "fraction" in suggestion
        ]
        return "; ".join([self.reason, *advice])


def percent(fraction: float) -> str:
    """Return a fraction as a percentage, with a decimal below 10 %."""
    return f"{100 * fraction:.0f} %" if not 0 < fraction < 0.0995 else f"{100 * fraction:.1f} %"


def judged(evidence: Evidence) -> Verdict:
    """Return whether a run will learn, and why not, without suggestions."""
    now = evidence.now
    if not evidence.rate:
        return Verdict(False, "will not learn: train.learning_rate=0")
    for name, of_reward in evidence.rewards.items():
        if of_reward["failed"]["value"] == 1:
            return Verdict(False, f"will not learn: reward.{name} failed on every completion")
    vary = f"{percent(now.fraction.value)} of groups have non-zero variance"
    truncated = f"{percent(evidence.truncated)} of completions are truncated"
    if evidence.masked and evidence.truncated >= TRUNCATED:
        masks = "and train.mask_truncated_completions=true takes them out of the loss"
        return Verdict(False, f"will probably not learn: {truncated}, {masks}")
    if now.fraction.value < FEW:
        causes = why_equal(evidence)
        return Verdict(False, f"will probably not learn: {vary}{f'; {causes}' if causes else ''}", True)
    if now.fraction.value * now.groups * evidence.steps < IN_ALL:
        steps = f"{evidence.steps} step{'s' * (evidence.steps > 1)} of {now.groups} group{'s' * (now.groups > 1)}"
        return Verdict(False, f"will probably not learn: too short, {steps}, of which {vary}")
    if reason := of_rewards(evidence) or of_rate(evidence):
        return Verdict(False, f"will probably not learn{reason}")
    noted = f"; {truncated}" if evidence.truncated >= NOTED else ""
    return Verdict(True, f"will learn{' slowly' if now.fraction.value < SLOW else ''}: {vary}{noted}", True)


def of_rewards(evidence: Evidence) -> str:
    """Return why rewards that vary do not teach the task; empty if they may."""
    if evidence.agreement and evidence.agreement.high < 0:
        return f": incorrect completions get the higher reward (correlation {evidence.agreement.value:.2f})"
    if evidence.agreement and unrelated(evidence, evidence.agreement):
        relation = f"correlation with correctness at most {evidence.agreement.high:.2f}"
        return f" the task: {' and '.join(evidence.rewards)} alone, {relation}"
    graded = evidence.rewards.get(evidence.grader or "", {}).get("mean")
    if graded and evidence.grader and not evidence.rewards[evidence.grader]["varies"]:
        others = ", ".join(name for name, reward in evidence.rewards.items() if reward["varies"])
        value = graded["value"]
        return f" the task: only {others} varies, and reward.{evidence.grader} is {value:.2g} throughout each problem"
    return ""


def of_rate(evidence: Evidence) -> str:
    """Return why a run does not learn with its learning rate; empty if it may."""
    step, steps = evidence.first_step, evidence.steps
    if step and too_far(step):
        kl = "infinitely far" if step.kl is None else f"by {step.kl:.2g} nats per token"
        return f": train.learning_rate={step.rate:g} moves the policy {kl} in the first step"
    if step and too_little(step, steps):
        gain = f"better completions would gain {step.gain * steps:.2g} nats over worse ones"
        return f": train.learning_rate={step.rate:g} is too low for {steps} step{'s' * (steps > 1)}: {gain}"
    return ""


def unrelated(evidence: Evidence, agreement: Estimate) -> bool:
    """Return whether rewards without the grader are unrelated to correctness, if correctness varies enough."""
    known = evidence.accuracy is not None and FEW < evidence.accuracy < 1 - FEW
    return not evidence.grader and known and agreement.high < UNRELATED


def why_equal(evidence: Evidence) -> str:
    """Return the reason of zero-variance groups according to the samples."""
    causes = []
    if evidence.truncated >= NOTED:
        causes.append(f"{percent(evidence.truncated)} of completions are truncated")
    if evidence.accuracy is not None and not FEW < evidence.accuracy < 1 - FEW:
        causes.append(f"{percent(evidence.accuracy)} of completions are correct")
    constant = [name for name, reward in evidence.rewards.items() if reward["spread"] == 0]
    if constant:
        values = ", ".join(f"reward.{name} is {evidence.rewards[name]['lowest']:g}" for name in constant)
        causes.append(f"{values} for every completion")
    return "; ".join(causes)


def suggestions(prospects: Prospects, config: DictConfig, now: Prospect) -> list[dict[str, Any]]:
    """Return the changes that give clearly more groups with non-zero variance, and more of them per second.

    The first has the highest rate, or is the smallest group with nearly that; then a single change of its two.
    """
    if now.fraction.value >= ENOUGH:
        return []
    configured = config.train.num_generations
    sizes = [{}, *({"train.num_generations": str(size)} for size in SIZES if size > configured)]
    dynamic = [{}] if config.rollout.dynamic_sampling else [{}, {"rollout.dynamic_sampling": "true"}]
    changes = [size | other for size in sizes for other in dynamic if size or other]
    candidates = [prospect for change in changes if (prospect := prospects.of(change))]
    least = max(FEW, BETTER * now.fraction.value)
    good = [candidate for candidate in candidates if candidate.fraction.value >= least and candidate.rate > now.rate]
    return [as_suggestion(suggestion) for suggestion in ranked(good)[:MAX_SUGGESTIONS]]


def ranked(good: Sequence[Prospect]) -> list[Prospect]:
    """Return the smallest group with nearly the highest rate, then single changes by their rate."""
    if not good:
        return []
    highest = max(candidate.rate for candidate in good)
    first = min(
        (candidate for candidate in good if candidate.rate >= NEAR * highest),
        key=lambda prospect: (prospect.num_generations, -prospect.rate),
    )
    singles = sorted(
        (candidate for candidate in good if len(candidate.change) == 1 and candidate is not first),
        key=lambda prospect: -prospect.rate,
    )
    return [first, *singles]


def as_suggestion(prospect: Prospect) -> dict[str, Any]:
    """Return a prospect as the report has it."""
    per = "second" if prospect.seconds else "step"
    return {
        "overrides": [f"{key}={value}" for key, value in prospect.change.items()],
        "fraction": prospect.fraction.value,
        "interval": [prospect.fraction.low, prospect.fraction.high],
        "effect": f"{prospect.rate:.3g} effective completions per {per}",
    }
