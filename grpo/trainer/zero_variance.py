"""Groups whose completions all have the same reward: their advantages are zero, without the noise of rounding."""

import torch


def zero_variance(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return which completions are in a group with equal rewards, bitwise, (completions).

    The mean of eight rewards of 0.1 is not 0.1 in float32, so that TRL gives such a group advantages of up to 7e-5
    where there is nothing to prefer.

    Args:
        rewards: (completions, rewards), or their weighted sum as (completions, 1); NaN where there is none.
        group: completions per group.
    """
    groups = rewards.view(-1, group, rewards.size(1))
    missing = groups.isnan()
    highest = groups.masked_fill(missing, -torch.inf).amax(1)
    lowest = groups.masked_fill(missing, torch.inf).amin(1)
    return (highest <= lowest).all(1).repeat_interleave(group)
