"""From the problems of a step to a batch of scored completions: sample, then assemble."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from grpo.trainer.batch import Batch
from grpo.trainer.rollout.assemble import assemble
from grpo.trainer.rollout.completer import Completer
from grpo.trainer.rollout.completion import Group, Row
from grpo.trainer.rollout.sampling import Source, groups_of, rows_of, sample
from grpo.trainer.rollout.stages import Stage
from grpo.utils.patching import replaced


@dataclass
class Rollouts:
    """Makes the rollouts of a step. The trainer comes as an argument."""

    source: Source
    """Takes problems, and samples completions of a training's step."""
    completer: Completer
    """Completes prompts."""
    stages: Sequence[Stage] = field(default_factory=list)
    """Act on the rollouts, in this order; each has those before it within its `assemble`."""
    pass_at_k: int | None = None
    """Number of completions of which the best counts; None where each counts."""

    def make(self, trainer: Any, rows: list[Row], stock: Callable[[list[Row]], Batch]) -> Batch:
        """Return rollouts with their advantages, and the step at which they were made.

        The step is that of training: an evaluation in between makes rollouts too.

        Args:
            trainer: an `ExactGRPOTrainer`.
            rows: of the data loader; where problems are chosen, only their number counts.
            stock: TRL's `_generate_and_score_completions`.
        """
        with trainer.clock.of("rollout", trainer.model.training):
            if trainer.model.training:
                completions, rows = self.source.sample(trainer, rows)
            else:
                completions, rows, _ = sample(trainer, rows, range(len(rows)))
            batch_of = partial(assemble, trainer, rows, completions, stock)
            for stage in self.stages:
                batch_of = partial(stage.assemble, trainer, completions, batch_of)
            batch = batch_of()
        self.completer.close()
        return batch | {"generated_at": torch.tensor(trainer.state.global_step)}

    def sample_groups(self, trainer: Any, problems: list[int], size: int) -> list[Group]:
        """Return the scored groups of some problems, of `size` completions each, as a round of dynamic sampling is."""
        try:
            with replaced(trainer, "num_generations", size), trainer.clock.of("rollout"):
                rows = rows_of(trainer, problems, size)
                return [group for group, _ in groups_of(trainer, problems, rows)]
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget what was generated since the last batch: it is of no step."""
        self.completer.close()
        for stage in self.stages:
            stage.discard()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        return {"completions_at_once": self.completer.batching.limit, **self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        at_once = self.completer.batching
        limits = (at_once.limit, state.get("completions_at_once"))
        at_once.limit = min((limit for limit in limits if limit), default=None)
        self.source.load_state_dict(state)
