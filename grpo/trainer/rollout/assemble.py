"""The second phase of rollouts: finished completions become a batch, by TRL's own method."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.batch import Batch, check
from grpo.trainer.processes import own_part
from grpo.trainer.rollout import advantages
from grpo.trainer.rollout.completion import Completion, Row
from grpo.trainer.rollout.episodes import images_by_row


def assemble(
    trainer: Any, rows: list[Row], completions: Sequence[Completion], stock: Callable[[list[Row]], Batch]
) -> Batch:
    """Return TRL's batch of completions, with its advantages as `advantages.finish` makes them.

    Args:
        trainer: an `ExactGRPOTrainer`.
        rows: of this process's completions, with their images.
        completions: of all processes.
        stock: TRL's `_generate_and_score_completions`.
    """
    local = own_part(trainer.accelerator, completions)
    rewards = torch.tensor([completion.rewards for completion in completions], device=trainer.accelerator.device)
    names = dict.fromkeys(column for completion in completions for column in completion.columns)
    columns = {name: [completion.columns.get(name) for completion in local] for name in names}
    prompts = [  # TRL would put images into prompts, which have their places, and reads no other columns
        {"prompt": completion.prompt, "environment": row.get("environment")}
        for row, completion in zip(rows, local, strict=True)
    ]
    batch = trl.assemble(trainer, prompts, as_generated(rows, local), rewards, columns, stock)
    check(batch)
    advantages.finish(trainer, batch, rewards, len(rows))
    return batch


def as_generated(rows: list[Row], completions: Sequence[Completion]) -> tuple:
    """Return completions of this process as TRL's `_generate` does; `rows` are those of the data."""
    masks = [completion.mask for completion in completions] if completions[0].mask is not None else None
    logps = [completion.logps for completion in completions] if completions[0].logps is not None else None
    ids, messages = [completion.ids for completion in completions], [completion.messages for completion in completions]
    of_rows = images_by_row(rows) or [None] * len(rows)
    images = [completion.images or of_row or [] for completion, of_row in zip(completions, of_rows, strict=True)]
    tool_images = [completion.tool_images or [] for completion in completions]
    prompt_ids = [completion.prompt_ids for completion in completions]
    return prompt_ids, ids, masks, messages, logps, {}, images if any(images) else None, tool_images
