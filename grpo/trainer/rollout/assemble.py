"""The second phase of rollouts: TRL makes a batch of finished completions."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from grpo.trainer.batch import Batch
from grpo.trainer.processes import own_part
from grpo.trainer.rollout.episodes import images_of
from grpo.trainer.rollout.sampling import Completion, Row
from grpo.trainer.rollout.thumbnails import strip_images
from grpo.utils.patching import replaced


class Ended:
    """An environment whose episode is over."""

    def reset(self, **row: Any) -> None:
        """Observe nothing."""


def assemble(
    trainer: Any, rows: list[Row], completions: Sequence[Completion], stock: Callable[[list[Row]], Batch]
) -> Batch:
    """Return TRL's batch of completions: padding, images, log-probabilities, advantages.

    Args:
        trainer: an `ExactGRPOTrainer`.
        rows: of this process's completions, with their images.
        completions: of all processes.
        stock: TRL's `_generate_and_score_completions`.
    """
    own = own_part(trainer.accelerator, completions)
    rewards = torch.tensor([completion.rewards for completion in completions], device=trainer.accelerator.device)
    for column in dict.fromkeys(column for completion in completions for column in completion.columns):
        trainer._log_completion_extra(column, [completion.columns.get(column) for completion in own])
    for column in trainer._logs["extra"].keys() - trainer._pending_extra_logs.keys():
        trainer._log_completion_extra(column, [None] * len(own))  # as a table has all or none of a row
    if trainer.rollouts.filtered:
        trainer.rollouts.filtered.give([completion.logps for completion in own])

    def scored(rows: list[Row], prompts: list, *_: Any) -> torch.Tensor:
        strip_images(rows, prompts)
        return rewards

    with ExitStack() as given:
        generated = as_generated(rows, own)
        given.enter_context(replaced(trainer, "_generate", lambda prompts: generated))
        given.enter_context(replaced(trainer, "_calculate_rewards", scored))
        if trainer.environment_factories is not None:
            over = dict.fromkeys(trainer.environment_factories, Ended)
            given.enter_context(replaced(trainer, "environment_factories", over))
            given.enter_context(replaced(trainer, "_environment_pool", defaultdict(list)))
            given.enter_context(replaced(trainer, "environments", None))
        return stock([row | {"prompt": completion.prompt} for row, completion in zip(rows, own, strict=True)])


def as_generated(rows: list[Row], own: Sequence[Completion]) -> tuple:
    """Return this process's completions as TRL's `_generate` does; `rows` are those of the data."""
    masks = [completion.mask for completion in own] if own[0].mask is not None else None
    logps = [completion.logps for completion in own] if own[0].logps is not None else None
    ids, messages = [completion.ids for completion in own], [completion.messages for completion in own]
    tool_images = [completion.tool_images or [] for completion in own]
    images = None
    if any(tool_images):
        of_data = images_of(rows) or [None] * len(rows)
        images = [completion.images or shown for completion, shown in zip(own, of_data, strict=True)]
    return [completion.prompt_ids for completion in own], ids, masks, messages, logps, {}, images, tool_images
