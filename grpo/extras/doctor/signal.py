"""Findings about the reward as a signal: constant, missing, equal within groups, falling."""

import math
from statistics import fmean, median

from grpo.extras.doctor.change_point import fall_of
from grpo.extras.doctor.diagnosis import Diagnosis, listed
from grpo.extras.doctor.history import Group, History

EQUAL = 1e-5
"""Standard deviation of rewards, relative to their size, that is rounding."""


def reward_constant(history: History) -> Diagnosis | None:
    """The mean reward is the same in every step, and no step has different rewards."""
    rewards = history.values("reward")
    if len(rewards) < 5:
        return None
    values = [value for _, value in rewards]
    size, spread = max(1e-3, max(map(abs, values))), [value for _, value in history.values("reward_std")]
    if max(values) - min(values) > EQUAL * size or (spread and max(spread) > EQUAL * size):
        return None
    evidence = f"reward {values[0]:.4g} in all {len(values)} logged steps"
    evidence += f", reward_std {max(spread):.2g} at most" if spread else ""
    zero = max(map(abs, values)) < 1e-9
    return Diagnosis(
        "reward_constant",
        f"The reward is {'0' if zero else 'the same'} for every completion",
        evidence,
        "try the reward function on the completions of the run: a pattern that the prompt does not ask for, a column "
        "with another name, or an except clause that returns a default are the usual causes",
        "error",
    )


def reward_missing(history: History) -> Diagnosis | None:
    """Completions, or all completions of a step, have no reward."""
    logged = [row for row in history.steps if "reward" in row]
    without = [row["step"] for row in logged if row["reward"] is None or not math.isfinite(row["reward"])]
    missing = [row for row in history.completions if row.rewards and all(v is None for v in row.rewards.values())]
    fractions, evidence = [0.0], []
    if without:
        fractions.append(len(without) / len(logged))
        evidence.append(f"no reward in {len(without)} of {len(logged)} steps, the first of them {without[0]}")
    if missing:
        fractions.append(len(missing) / len(history.completions))
        evidence.append(
            f"{len(missing)} of {len(history.completions)} completions have none, such as {quoted(missing[0].text)} in "
            f"step {missing[0].step}"
        )
    fraction = max(fractions)
    if fraction < 0.001:
        return None
    return Diagnosis(
        "reward_missing",
        "Completions have no reward",
        "; ".join(evidence),
        "the reward function returns None or NaN for them, so that they train nothing: return a number, 0 for a "
        "completion that cannot be read",
        "error" if fraction >= 0.5 else "warning" if fraction >= 0.05 else "info",
    )


def zero_variance_missed(history: History) -> Diagnosis | None:
    """TRL counts groups as different whose rewards are equal but for rounding.

    It is a warning where all rewards of a step are equal, so that the step follows rounding alone.
    """
    counted, exact = history.values("frac_reward_zero_std"), dict(zero_variance(history))
    sizes, spreads = dict(history.values("reward")), dict(history.values("reward_std"))
    equal = [
        (step, value)
        for step, value in counted
        if value < 1 and spreads.get(step, math.inf) < EQUAL * max(1e-3, abs(sizes.get(step, 0.0)))
    ]
    missed = [(step, value) for step, value in counted if step in exact and exact[step] > value + 0.1]
    if len(equal) >= max(2, len(counted) / 10):
        evidence = f"{len(equal)} steps have equal rewards only, and frac_reward_zero_std below 1 ({listed(equal)})"
    elif len(missed) >= max(2, len(counted) / 10):
        step, value = missed[0]
        evidence = (
            f"{len(missed)} of {len(counted)} steps; step {step}: {exact[step]:.0%} of the groups, TRL: {value:.0%}"
        )
    else:
        return None
    return Diagnosis(
        "zero_variance_missed",
        "frac_reward_zero_std misses groups with equal rewards",
        evidence,
        "the mean of equal rewards, such as 0.2, is not exactly 0.2 in float32, and rounding stands for advantages, "
        "which Adam scales up to full steps where there is nothing else: make the reward differ, and take weights with "
        "an exact mean, such as 0.25 or 1. Groups without any reward are not counted either",
        "warning" if len(equal) >= max(2, len(counted) / 10) else "info",
    )


def zero_variance(history: History) -> list[tuple[int, float]]:
    """Return (step, fraction of groups whose rewards are all equal), exactly, of tables of completions.

    A group also counts if its advantages are rounding, as where all rewards that differ have the weight 0.
    """
    by_step: dict[int, list[bool]] = {}
    for group in history.groups:
        by_step.setdefault(group[0].step, []).append(is_equal(group))
    return [(step, fmean(equal)) for step, equal in by_step.items()]


def is_equal(group: Group) -> bool:
    """Return whether no reward tells the completions of a group apart."""
    if all(row.rewards == group[0].rewards for row in group):
        return True
    advantages = [row.advantage for row in group if row.advantage is not None]
    return len(advantages) == len(group) and max(map(abs, advantages)) < 1e-3


def collapse(history: History) -> Diagnosis | None:
    """The reward has fallen for good."""
    rewards = history.values("reward")
    fall = fall_of([value for _, value in rewards])
    if not fall:
        return None
    step, changes = rewards[fall.place][0], []
    for name in ("learning_rate", "grad_norm", "entropy", "kl", "completions/mean_length"):
        before = [value for at, value in history.values(name) if at < step]
        after = [value for at, value in history.values(name) if at >= step]
        if before and after and not 0.5 <= median(after) / (median(before) or 1e-12) <= 2:
            changes.append(f"{name} {median(before):.3g} before, {median(after):.3g} after")
    return Diagnosis(
        "collapse",
        f"The reward has collapsed at step {step}",
        f"{fall.before:.3g} at best, {fall.after:.3g} since (p < {max(fall.p, 1e-6):.1g})"
        + "".join(f"; {change}" for change in changes),
        "continue from a checkpoint before that step with a lower learning_rate, a lower max_grad_norm, or a penalty "
        "for leaving the reference, beta=0.01",
    )


def quoted(text: str, most: int = 80) -> str:
    """Return a model's text as a literal that a terminal can show, without the rest of a long one."""
    return repr(text if len(text) <= most else text[:most] + "…")
