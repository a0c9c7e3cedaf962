"""The sampling temperature of each step's rollouts, at which their completions are scored as long as they are used.

TRL's head divides logits by a temperature that it gets once, and the importance ratios compare probabilities at the
temperature of sampling. A batch therefore keeps its temperature, over several steps and in checkpoints.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from trl.trainer import utils

from grpo.utils.patching import patched


class Temperature:
    """A temperature that moves linearly from the first step to the last.

    Args:
        start: of the first step, and of evaluations.
        end: of the last step.
    """

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self.now = start
        """Temperature of the completions that are scored."""

    def begin(self, trainer: Any) -> None:
        """Have the rollouts of a step, or those of an evaluation, sampled and scored at their temperature."""
        done, last = trainer.state.global_step, trainer.state.max_steps - 1
        part = min(1.0, done / last) if trainer.model.training and last > 0 else 0.0
        self.now = trainer.temperature = self.start + (self.end - self.start) * part
        if trainer.use_vllm:
            trainer.vllm_generation.temperature = self.now
        else:
            trainer.generation_config.temperature = trainer.generation_kwargs["temperature"] = self.now

    @contextmanager
    def of_head(self) -> Iterator[None]:
        """While inside, TRL's head divides logits by the temperature of the scored completions."""
        stock, now = utils._ChunkedLogProbFunction, self.now

        def apply(hidden: torch.Tensor, weight: Any, bias: Any, targets: torch.Tensor, _: float, *more: Any) -> tuple:
            return stock.apply(hidden, weight, bias, targets, now, *more)

        with head(apply):
            yield


def head(apply: Callable[..., tuple]) -> AbstractContextManager[None]:
    """Return a context in which a function is in the place of the `apply` of TRL's head."""
    return patched("trl.trainer.utils:_ChunkedLogProbFunction", SimpleNamespace(apply=apply))
