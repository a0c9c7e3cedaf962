"""Stages: features that act on rollouts, each at moments of its own. A feature that is off is not in the list."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.trainer.batch import Batch
from grpo.trainer.rollout.completion import Completion, Row


class Stage:
    """A feature that acts on rollouts; does nothing at the moments that it does not override.

    The trainer is an `ExactGRPOTrainer`; with `engine.staleness` a thread's copy of it in `completed` and `scored`. An
    evaluation during the training has rollouts, too, for which `trainer.model.training` is false; preflight's are
    a training's.
    """

    def completed(self, trainer: Any, rows: list[Row], ids: list[list[int]]) -> None:
        """Act on completions before they are scored: rows of this process, and the tokens of their completions."""

    def scored(self, trainer: Any, ids: list[list[int]], masks: list | None, rewards: torch.Tensor) -> None:
        """Act on rewards, in place; a completion whose rewards are all NaN is skipped.

        Args:
            ids: tokens of the completions of this process.
            masks: of each, 1 for tokens of the policy and 0 for those of tools; None without tools.
            rewards: of all processes, (completions, rewards).
        """

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch of completions, of all processes, that `batch_of` makes; act before and after it."""
        return batch_of()

    def discard(self) -> None:
        """Forget what was generated since the last batch: it is of no step."""
