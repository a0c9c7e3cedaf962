"""The effect of other rewards on stored completions."""

from collections.abc import Sequence
from typing import Any

import torch


def effect(
    then: list[list[float]], now: list[list[float]], names: Sequence[str], weights: Sequence[float], size: int
) -> dict[str, Any]:
    """Return what other rewards would have changed in a step.

    Args:
        then: rewards of the run, (completions, rewards); NaN where one failed.
        now: rewards of today, likewise.
        names: of the rewards.
        weights: of the rewards.
        size: completions per group.

    Returns:
        By reward `mean`, `mean_now`, and the completions that `changed` theirs or on which it `failed` today; of their
        sum the `zero_variance` groups of both, and the completions whose advantage changes between positive, zero and
        negative, `signs`.
    """
    before, today = torch.tensor(then, dtype=torch.float64), torch.tensor(now, dtype=torch.float64)
    by_name = {
        name: {
            "mean": before[:, place].nanmean().item(),
            "mean_now": today[:, place].nanmean().item(),
            "failed": int(today[:, place].isnan().sum()),
            "changed": int((before[:, place].nan_to_num(torch.inf) != today[:, place].nan_to_num(torch.inf)).sum()),
        }
        for place, name in enumerate(names)
    }
    factors = torch.tensor(list(weights), dtype=torch.float64)
    groups, groups_now = ((rewards * factors).nansum(1).view(-1, size) for rewards in (before, today))
    signs, signs_now = (
        (group - group.mean(1, keepdim=True)).round(decimals=9).sign() for group in (groups, groups_now)
    )
    return {
        "completions": len(then),
        "rewards": by_name,
        "groups": len(groups),
        "zero_variance": int((groups == groups[:, :1]).all(1).sum()),
        "zero_variance_now": int((groups_now == groups_now[:, :1]).all(1).sum()),
        "signs": int((signs != signs_now).sum()),
    }
