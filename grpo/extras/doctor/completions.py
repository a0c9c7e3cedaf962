"""Findings that only tables of completions show: identical completions, rewards that are lengths."""

from collections.abc import Sequence
from statistics import fmean

from grpo.extras.doctor.diagnosis import Diagnosis
from grpo.extras.doctor.history import Group, History
from grpo.extras.doctor.signal import quoted

LEAST = 20
"""Groups that a rule needs."""
NEAR_1 = 0.9
"""Rank correlation from which a reward is a function of the length. A reward of two values stays below 0.87."""


def identical(history: History) -> Diagnosis | None:
    """Half of the groups hold a single completion at the beginning, or nine of ten at the end of an unsolved task."""
    groups = history.groups
    if len(groups) < LEAST:
        return None
    quarter = max(5, len(groups) // 4)
    alike = [len({row.text for row in group}) == 1 for group in groups]
    first, last = fmean(alike[:quarter]), fmean(alike[-quarter:])
    if first < 0.5 and (last < 0.9 or is_solved(groups, quarter)):
        return None
    group = next(group for group, equal in zip(groups, alike, strict=True) if equal)
    return Diagnosis(
        "identical",
        "The completions of a group are identical",
        f"in {first:.0%} of the groups in the first quarter and {last:.0%} in the last; step {group[0].step}: "
        f"{len(group)} times {quoted(group[0].text)}",
        "sample with temperature=1 and without top_k, top_p or a fixed seed of the engine; if the policy has collapsed "
        "during the run, lower learning_rate",
    )


def is_solved(groups: Sequence[Group], quarter: int) -> bool:
    """Return whether the rewards of the last groups are near the highest of the run."""
    totals = [[sum(value or 0.0 for value in row.rewards.values()) for row in group] for group in groups]
    highest, lowest = max(map(max, totals)), min(map(min, totals))
    return fmean(map(fmean, totals[-quarter:])) >= lowest + 0.8 * (highest - lowest)


def length_only(history: History) -> Diagnosis | None:
    """The reward ranks the completions of a group as their lengths do.

    The test is the rank correlation within groups (Spearman's, pooled over groups): `NEAR_1` or more in absolute
    value, over 20 groups or more in which both differ. Without a relation its standard error is the inverse root of
    completions minus groups. A reward for the length beside others is none: all rewards count, as advantages do.
    """
    ranked = [
        (ranks(totals), ranks([len(row.text) for row in group]))
        for group in history.groups
        if (totals := totals_of(group))
    ]
    varied = [(reward, length) for reward, length in ranked if any(reward) and any(length)]
    if len(varied) < max(LEAST, len(ranked) / 4):
        return None
    pairs = [pair for reward, length in varied for pair in zip(reward, length, strict=True)]
    norm = (sum(reward**2 for reward, _ in pairs) * sum(length**2 for _, length in pairs)) ** 0.5
    together = sum(reward * length for reward, length in pairs) / norm
    if abs(together) < NEAR_1:
        return None
    errors = abs(together) * (len(pairs) - len(varied)) ** 0.5
    return Diagnosis(
        "length_only",
        "The reward is the length of the completion",
        f"rank correlation {together:+.3f} within {len(varied)} groups ({errors:.0f} standard errors from 0): "
        f"{'longer' if together > 0 else 'shorter'} completions always have the higher reward",
        "the policy will learn to write long or short, and nothing else: add a reward for content, or bound this one",
    )


def totals_of(group: Group) -> list[float]:
    """Return values that order the completions of a group as their total rewards do; none if they are not known.

    Advantages do; without them a single reward function does, as the weights of several are not in the table.
    """
    advantages = [row.advantage for row in group if row.advantage is not None]
    if len(advantages) == len(group):
        return advantages
    values = [value for row in group for value in row.rewards.values() if value is not None]
    return values if len(values) == len(group) and len(group[0].rewards) == 1 else []


def ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values less their mean, ties with the mean of their ranks; all 0 if no two differ."""
    ordered = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(ordered)))}
    last = {value: place for place, value in enumerate(ordered)}
    return [(first[value] + last[value]) / 2 - (len(values) - 1) / 2 for value in values]
