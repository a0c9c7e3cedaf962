"""Rewards with which a policy learns that the best of k completions is good, instead of each of them.

The objective is the expected largest reward of k independent completions; for rewards of 0 and 1 that is pass@k. Of n
completions with rewards r, the mean m of the largest reward over all subsets of k completions is an unbiased estimate.
The k completions of a subset are independent, so an unbiased estimate of the gradient is the mean over the subsets of
the largest reward times the sum of the scores ∇log π of the completions in it (2505.15201). The score of completion i
is thereby multiplied by k/n times

    t(i) = the mean of the largest reward over those subsets of k completions that contain i.

With t in the place of r, GRPO subtracts the mean of t, which is m. The expectation of m times the sum of all scores is
the gradient of the expectation of m, the objective's. The mean over completions of (t - m) ∇log π therefore has the
expectation (1/k - 1/n) times the gradient of the objective: for k = 1, GRPO's.

For rewards of 0 and 1, t - m is the numerator of the advantages of 2508.10751, which divide it by √(m (1 - m)).
"""

from math import comb

import torch


def best_of(rewards: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """Return t of each completion, (completions); NaN where the reward is NaN. Equal rewards have bitwise equal t.

    All t of a group are equal where it has at most k rewards, and where any k of them include the largest: such groups
    teach nothing.

    Args:
        rewards: (completions).
        group: completions per group.
        k: number of completions of which the best counts.
    """
    best = torch.full_like(rewards, torch.nan, dtype=torch.float64)
    for start in range(0, len(rewards), group):
        present = start + (~rewards[start : start + group].isnan()).nonzero().squeeze(1)
        ascending, order = rewards[present].double().sort()
        best[present[order]] = _of_sorted(ascending, k)
    return best.to(rewards.dtype)


def _of_sorted(rewards: torch.Tensor, k: int) -> torch.Tensor:
    """Return t of ascending rewards: the lowest reward and, for each further one, the rise times a probability.

    It is the probability that a subset reaches that place: 1 if its completion i does, else that of the others.
    """
    count = len(rewards)
    others = [1 - comb(place - 1, k - 1) / comb(count - 1, k - 1) if count > k else 1.0 for place in range(1, count)]
    reached = torch.tensor(others, dtype=rewards.dtype, device=rewards.device).expand(count, -1)
    places = torch.arange(count, device=rewards.device)
    return rewards[:1] + (rewards.diff() * reached.where(places[:, None] < places[None, 1:], 1.0)).sum(1)
