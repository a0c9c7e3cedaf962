"""The first phase of rollouts: problems are completed, and their completions are scored."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo.trainer import trl
from grpo.trainer.processes import own_part
from grpo.trainer.rollout import episodes
from grpo.trainer.rollout.advantages import learned, zero_variance
from grpo.trainer.rollout.completion import Completion, Group, Row
from grpo.trainer.rollout.scoring import score
from grpo.view.stream import NUMBER, Stream

Sampled = tuple[list[Completion], list[Row]]
"""Completions of all processes, and this process's rows with opened images."""


class Source:
    """Takes the problems that the data loader gives, or those of a stream whose numbers it gives.

    Args:
        stream: the problems, where they are read while the run trains.
    """

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream

    def sample(self, trainer: Any, rows: list[Row]) -> Sampled:
        """Return the completions of a step; a collective call."""
        if self.stream:
            self.stream.release(rows[0][NUMBER])
            with trainer.clock.of("data"):
                rows = [self.stream[row[NUMBER]] for row in rows]
        completions, rows, _ = sample(trainer, rows, range(len(rows)))
        return completions, rows

    def has_taken_all(self, args: Any) -> bool:
        """Return whether the problems are over, which the data loader knows by itself."""
        return False

    def ahead(self, trainer: Any) -> AbstractContextManager[None]:
        """Return the context of a training; rollouts may be in flight inside, none are before and afterwards."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on; the data loader has a state of its own."""
        return {"order": None, "in_flight": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""


def rows_of(trainer: Any, problems: Sequence[int], size: int) -> list[Row]:
    """Return the rows of this process's part of some problems, each as often as a group has completions."""
    with trainer.clock.of("data"):
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
    for stage in trainer.rollouts.stages:
        stage.completed(trainer, rows, ids)
    rewards = score(trainer, rows, prompts, messages, ids)
    for stage in trainer.rollouts.stages:
        stage.scored(trainer, ids, masks, rewards)
    columns = trl.take_columns(trainer)
    own_rewards = own_part(trainer.accelerator, rewards.tolist())
    of_rows = episodes.images_by_row(rows) or [None] * len(rows)
    completions = [
        Completion(
            problem=problem,
            prompt_ids=prompt_ids[row],
            ids=ids[row],
            mask=masks and masks[row],
            logps=logps and logps[row],
            prompt=prompts[row],
            messages=messages[row],
            rewards=own_rewards[row],
            columns={name: values[row] for name, values in columns.items() if row < len(values)},
            images=images[row] if images and len(images[row]) != len(of_rows[row] or []) else None,
            tool_images=tool_images[row] if tool_images else None,
            policy=trainer.state.global_step,
        )
        for row, problem in enumerate(problems)
    ]
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
    with trl.without_metrics(trainer):  # TRL's are of the groups that are trained on
        completions, _, rewards = sample(trainer, rows, numbers)
    groups = [completions[first : first + size] for first in range(0, len(completions), size)]
    equal = zero_variance(*learned(trainer, rewards, size), size, trainer.multi_objective_aggregation)
    return list(zip(groups, equal.view(-1, size)[:, 0].tolist(), strict=True))
