"""A reward model that scores as many completions at once as fit into memory."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from grpo.trainer.measurements import MemoryReadings
from grpo.trainer.microbatch import Microbatch, pack
from grpo.trainer.processes import of_all
from grpo.trainer.token_budget import TokenBudget
from grpo.utils.oom import is_out_of_memory, smaller_until_it_fits


class MicrobatchedRewardModel(torch.nn.Module):
    """A reward model as TRL calls it, in micro-batches under a token budget; halves them after an OOM.

    Args:
        model: a sequence-classification model, prepared by accelerate.
        budget: of the trainer.
        memory: gets the peak.
        accelerator: of accelerate.
        sharded: whether each process has a part of the weights, so that all have to make as many passes.
        survives: whether to try again after an exception.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        budget: TokenBudget,
        memory: MemoryReadings,
        accelerator: Any = None,
        sharded: bool = False,
        survives: Callable[[BaseException], bool] = is_out_of_memory,
    ) -> None:
        super().__init__()
        self.model, self.budget, self.memory = model, budget, memory
        self.accelerator, self.sharded, self.survives = accelerator, sharded, survives
        self.most = float("inf")
        """Tokens that a micro-batch may have, after an OOM."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **fields: Any) -> SimpleNamespace:
        """Return `logits`, (completions, 1), of sequences that are padded on the right.

        Args:
            input_ids: (completions, length).
            attention_mask: likewise.
            fields: others of the tokenizer.
        """
        lengths = attention_mask.sum(1).tolist()
        logits = torch.zeros(len(lengths), 1, device=input_ids.device)

        def parts() -> list[Microbatch]:
            passes = pack([0] * len(lengths), lengths, int(min(self.budget.allowed(), self.most)))
            if self.sharded:
                passes += [passes[-1]] * (max(of_all(self.accelerator, len(passes))) - len(passes))
            return passes

        def score(part: Microbatch) -> None:
            rows, width = list(part.rows), part.completion_length
            inputs = {"input_ids": input_ids[rows, :width], "attention_mask": attention_mask[rows, :width]}
            logits[rows] = self.model(**inputs).logits.float()

        def shrink(failed: Microbatch | None) -> None:
            self.most = (failed.tokens if failed else self.most) // 2
            self.budget.retry()

        def advice(failed: Microbatch | None) -> str:
            return (
                f"the reward model does not score a sequence of {max(lengths)} tokens: lower "
                "max_completion_length, or use a smaller reward model or half precision"
            )

        with self.memory.of("reward"):
            smaller_until_it_fits(parts, score, shrink, advice, self.survives)
        return SimpleNamespace(logits=logits)
