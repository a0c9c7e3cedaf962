"""The first phase of rollouts: problems are completed, and their completions are scored."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo.trainer.processes import own_part
from grpo.trainer.rollout import episodes
from grpo.trainer.rollout.advantages import learned, zero_variance

Row = dict[str, Any]


@dataclass
class Completion:
    """A completion that has been generated and scored."""

    problem: int
    """Its row in the data, or in the batch of a data loader."""
    prompt_ids: list[int]
    ids: list[int]
    mask: list[int] | None
    """1 for tokens of the policy, 0 for those of tools; None without tools."""
    logps: list | None
    """By the engine, for each token, as TRL's `rollout_func` returns them."""
    prompt: Any
    """The prompt with what an environment's `reset` has added, without its images."""
    messages: Any
    """Its text, or its messages, tool calls and their results included."""
    rewards: list[float]
    columns: dict[str, Any]
    """Values that rewards have logged for the completion."""
    images: list | None = None
    """The images of its prompt and of tools; None where they are those of its row, which no process sends."""
    tool_images: list | None = None
    """The images of tools among them."""
    policy: int = 0
    """Number of updates of the policy that began it; of rollouts in flight."""


Group = list[Completion]


def rows_of(trainer: Any, problems: Sequence[int], size: int) -> list[Row]:
    """Return the rows of this process's part of some problems, each as often as a group has completions."""
    with trainer.rollouts.clock.of("data"):
        return [trainer.problems[problem] for problem in own_part(trainer.accelerator, problems) for _ in range(size)]


def sample(trainer: Any, rows: list[Row], problems: Sequence[int]) -> tuple[list[Completion], list[Row], torch.Tensor]:
    """Complete the problems of rows, and score the completions; a collective call.

    Args:
        trainer: an `ExactGRPOTrainer`.
        rows: of this process, one for each completion.
        problems: their numbers.

    Returns:
        Completions of all processes, this process's rows with opened images and the fields of `rollout_func`, and
        rewards of all processes, (completions, rewards).
    """
    rows, prompts, generated = episodes.rollouts(trainer, rows)
    prompt_ids, ids, masks, messages, logps, _, images, tool_images = generated
    rewards = trainer.rollouts.score(trainer, rows, prompts, messages, ids)
    columns, trainer._pending_extra_logs = trainer._pending_extra_logs, defaultdict(list)
    by_row: list[Row] = [{} for _ in rows]
    for name, values in columns.items():  # of which a reward may have logged too few
        for column, value in zip(by_row, values, strict=False):
            column[name] = value
    if images and (of_rows := episodes.images_by_row(rows)):
        images = [
            None if len(shown) == len(of_row or []) else shown for shown, of_row in zip(images, of_rows, strict=True)
        ]
    own_rewards = own_part(trainer.accelerator, rewards.tolist())
    fields = (prompt_ids, ids, masks, logps, prompts, messages, own_rewards, by_row, images, tool_images or None)
    filled = ([None] * len(rows) if values is None else values for values in fields)
    completions = [Completion(*values) for values in zip(problems, *filled, strict=True)]
    if trainer.accelerator.num_processes > 1:
        completions = gather_object(completions)
    return completions, rows, rewards


def groups_of(trainer: Any, problems: Sequence[int], rows: list[Row]) -> list[tuple[Group, bool]]:
    """Return the scored groups of problems, of all processes, each with whether all of its rewards are equal.

    Args:
        trainer: an `ExactGRPOTrainer`.
        problems: of all processes.
        rows: as of `rows_of`.
    """
    size = trainer.num_generations
    numbers = [problem for problem in own_part(trainer.accelerator, problems) for _ in range(size)]
    with episodes.without_metrics(trainer):  # TRL's are of the groups that are trained on
        completions, _, rewards = sample(trainer, rows, numbers)
    groups = [completions[first : first + size] for first in range(0, len(completions), size)]
    equal = zero_variance(*learned(trainer, rewards, size), size, trainer.multi_objective_aggregation)
    return list(zip(groups, equal.view(-1, size)[:, 0].tolist(), strict=True))
