"""Rewards of completions, as TRL calculates them, but for those that fail."""

from threading import Lock
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.rollout.columns import compares, unique, with_groups
from grpo.trainer.rollout.completion import Row
from grpo.trainer.rollout.thumbnails import strip_images
from grpo.trainer.rollout.tool_calls import as_text, loggable

ONE_AT_A_TIME = Lock()
"""Held while reward functions are called: rollouts in flight are scored one batch at a time."""


def score(trainer: Any, rows: list[Row], prompts: list, completions: list, ids: list) -> torch.Tensor:
    """Return the rewards of completions, (completions of all processes, rewards), as TRL's `_calculate_rewards`.

    TRL adds up the rewards that are not NaN: a failed one would count as 0, so that its completion has none here.
    Prompts and results of tools lose their images, and tool calls become text, in place: tables and checkpoints keep
    them, and rewards read them.
    """
    if any(map(compares, trainer.reward_funcs)):
        group = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        rows = with_groups(rows, group)
    if trainer.tools:
        completions[:] = [[as_text(message) for message in messages] for messages in completions]
    pending = trl.take_columns(trainer)
    failed = torch.zeros(len(prompts), dtype=torch.bool, device=trainer.accelerator.device)
    with ONE_AT_A_TIME:
        with trainer.clock.of("reward", trainer.model.training):
            rewards = trl.calculate_rewards(trainer, rows, prompts, completions, ids)
        for function in trainer.reward_funcs:
            isolated = getattr(function, "isolated", None)
            failed[isolated.faulted if isolated else []] = True
    logged = unique(trl.take_columns(trainer), {*pending, *trainer.reward_func_names}, len(prompts))
    for name, values in (pending | logged).items():
        trl.log_column(trainer, name, values)
    rewards[trainer.accelerator.gather(failed)] = torch.nan
    strip_images(rows, prompts)
    if trainer.tools:
        completions[:] = [[loggable(message) for message in messages] for messages in completions]
    return rewards
