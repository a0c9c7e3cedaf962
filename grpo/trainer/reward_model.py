"""A reward model that scores as many completions at once as fit into memory."""

from types import SimpleNamespace
from typing import Any

import torch

from grpo.trainer.microbatch import pack
from grpo.utils.errors import DoesNotFit


class MicrobatchedRewardModel(torch.nn.Module):
    """A reward model as TRL calls it, in micro-batches under the trainer's token budget; halves them after an OOM.

    Args:
        model: a sequence-classification model, prepared by accelerate.
        trainer: a `RolloutTrainer`.
    """

    def __init__(self, model: torch.nn.Module, trainer: Any) -> None:
        super().__init__()
        self.model, self.trainer = model, trainer
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
        while True:
            budget = int(min(self.trainer.budget.allowed(), self.most))
            parts = pack([0] * len(lengths), lengths, budget)
            if self.trainer.sharded:  # every pass gathers weights from all processes: as many on each
                parts += [parts[-1]] * (max(self.trainer._of_all(len(parts))) - len(parts))
            try:
                with self.trainer.memory.of("reward"):
                    for part in parts:
                        rows, width = list(part.rows), max(lengths[row] for row in part.rows)
                        inputs = {"input_ids": input_ids[rows, :width], "attention_mask": attention_mask[rows, :width]}
                        logits[rows] = self.model(**inputs).logits.float()
                return SimpleNamespace(logits=logits)
            except RuntimeError as error:
                if not self.trainer._survives(error):
                    raise
                largest = max(len(part.rows) * max(lengths[row] for row in part.rows) for part in parts)
                if all(len(part.rows) == 1 for part in parts):
                    raise DoesNotFit(
                        f"the reward model does not score a sequence of {max(lengths)} tokens: lower "
                        "max_completion_length, or use a smaller reward model or half precision"
                    ) from error
            self.most = largest // 2
            self.trainer._oom_retries += 1
            self.trainer.budget.release()
