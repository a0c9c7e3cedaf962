"""Generation by a vLLM server while the policy trains: rollouts that are one step old."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from grpo.config.options import Engine
from grpo.trainer.tool_calls import ToolCallTrainer
from grpo.utils.diagnosis import why_not_stale


class OverlapTrainer(ToolCallTrainer):
    """A trainer whose server makes the next rollouts during an update, with the policy before it.

    Only with `engine.staleness=1`. TRL's importance-sampling correction makes up for the one update in between: the
    log-probabilities of the completions are those of the policy that made them.

    Raises:
        ValueError: these arguments leave nothing to overlap, or nothing that corrects it.
    """

    def __init__(self, *args: Any, engine: Engine | None = None, **kwargs: Any) -> None:
        super().__init__(*args, engine=engine, **kwargs)
        self._overlaps = engine is not None and engine.staleness > 0
        if self._overlaps and (reason := why_not_stale(self.args)):
            raise ValueError(f"engine.staleness=1: {reason}")
        self._drawn = deque[Any]()  # from the data, and not trained on
        self._drawn_from: Iterator | None = None
        self._next_is_begun = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does; what an earlier call has begun is not taken up."""
        self._drawn_from, self._next_is_begun = None, False
        if self._overlaps:
            self.vllm_generation.forget_begun()
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Return the batches of a step, and draw those of the next one of this epoch."""
        if not self._overlaps:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if epoch_iterator is not self._drawn_from:
            self._drawn.clear()
            self._drawn_from = epoch_iterator
        self._drawn.extend(islice(epoch_iterator, max(0, 2 * num_batches - len(self._drawn))))
        batches = [self._drawn.popleft() for _ in range(min(num_batches, len(self._drawn)))]
        return batches, self._get_num_items_in_batch(batches, device)

    def _generate(self, prompts: list) -> Any:
        found = super()._generate(prompts)
        if self._overlaps and self.model.training:
            self._metrics["train"]["sampling/staleness"].append(float(self._next_is_begun))
            self._next_is_begun = self._has_next_step()
            if self._next_is_begun:
                ids, _, _ = self._tokenize_prompts([row["prompt"] for row in self._drawn[0]])
                self.vllm_generation.begin(ids, self.num_generations)
        return found

    def _has_next_step(self) -> bool:
        """Whether the rollouts of the next step can begin now.

        Not over the end of an epoch, and not where the engine is compared with the policy, as it has to be the policy.
        """
        following = self.state.global_step + 1
        return bool(self._drawn) and following < min(self.state.max_steps, self._next_engine_check)
