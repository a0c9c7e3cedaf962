"""Advantages: exactly zero in groups whose completions all have the same reward, and what a loss makes of others.

With `rollout.pass_at_k` they are TRL's of other rewards, those of `grpo.trainer.rollout.pass_at_k`.
"""

from collections.abc import Callable
from typing import Any

import torch
from trl.trainer.utils import nanstd

from grpo.trainer import trl
from grpo.trainer.batch import Batch
from grpo.trainer.rollout.pass_at_k import best_of


def combined(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of rewards, (completions); NaN where there is none.

    Args:
        rewards: (completions, rewards); NaN where a reward function gave none.
        weights: (rewards).
    """
    return (rewards * weights.to(rewards.device)).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)


def zero_variance(rewards: torch.Tensor, weights: torch.Tensor, group: int, aggregation: str) -> torch.Tensor:
    """Return which completions are in a group with equal rewards, bitwise, as TRL adds these up, (completions).

    The mean of eight rewards of 0.1 is not 0.1 in float32, so that TRL gives such a group advantages of up to 7e-5
    where there is nothing to prefer.

    Args:
        rewards: (completions, rewards); NaN where there is none.
        weights: of the rewards.
        group: completions per group.
        aggregation: `multi_objective_aggregation` of TRL.
    """
    if aggregation == "sum_then_normalize":
        rewards = combined(rewards, weights).unsqueeze(1)
    else:
        rewards = rewards * weights.to(rewards.device)
    groups = rewards.view(-1, group, rewards.size(1))
    missing = groups.isnan()
    highest = groups.masked_fill(missing, -torch.inf).amax(1)
    lowest = groups.masked_fill(missing, torch.inf).amin(1)
    return (highest <= lowest).all(1).repeat_interleave(group)


def loss_factors(
    rewards: torch.Tensor, weights: torch.Tensor, group: int, factor: Callable[[torch.Tensor], torch.Tensor] | None
) -> torch.Tensor:
    """Return by what a loss multiplies each advantage, (completions): `factor` of the mean reward of its group."""
    if factor is None:
        return torch.ones_like(rewards[:, 0])
    means = combined(rewards, weights).view(-1, group).nanmean(1)
    return factor(means).repeat_interleave(group)


def learned(trainer: Any, rewards: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rewards that advantages compare, (completions, rewards), and their weights.

    With `rollout.pass_at_k` the training compares a single reward. An evaluation does not: its groups may be smaller.
    """
    k = trainer.rollouts.pass_at_k if trainer.model.training else None
    if k is None:
        return rewards, trainer.reward_weights
    best = best_of(combined(rewards, trainer.reward_weights), group, k)
    return best.unsqueeze(1), torch.ones(1)


def normalized(rewards: torch.Tensor, group: int, scale: str) -> torch.Tensor:
    """Return TRL's advantages of one reward, (completions); 0 where it is NaN.

    Args:
        rewards: (completions).
        group: completions per group.
        scale: `scale_rewards` of TRL.
    """
    groups = rewards.view(-1, group)
    above = groups - groups.nanmean(1, keepdim=True)
    if scale != "none":
        above = above / ((nanstd(groups, dim=1)[:, None] if scale == "group" else nanstd(rewards)) + 1e-4)
    return above.nan_to_num().flatten()


def finish(trainer: Any, batch: Batch, rewards: torch.Tensor, count: int) -> None:
    """Make the advantages of equal rewards exactly zero, and those of others as the loss wants; log both.

    Args:
        trainer: an `ExactGRPOTrainer`.
        batch: of this process, as TRL returns it.
        rewards: of all processes, (completions, rewards).
        count: completions of this process.
    """
    group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    compared, weights = learned(trainer, rewards, group)
    factors = loss_factors(compared, weights, group, getattr(trainer.own_loss, "advantage_factor", None))
    equal = zero_variance(compared, weights, group, trainer.multi_objective_aggregation)
    factors[equal] = 0.0
    trainer.note({"rollout/zero_variance": equal.float().mean().item()})  # TRL's count has a tolerance for rounding
    logged = trl.logged_advantages(trainer)  # as many of the newest as a generation has; an evaluation may have more
    replaces = compared is not rewards
    if replaces:
        factors = factors * normalized(compared[:, 0], group, trainer.scale_rewards)
    local_factors = factors[trainer.accelerator.process_index * count :][:count]
    batch["advantages"] = local_factors if replaces else batch["advantages"] * local_factors
    for behind, by in enumerate(factors.flip(0)[: len(logged)].tolist(), 1):
        logged[-behind] = by if replaces else logged[-behind] * by
