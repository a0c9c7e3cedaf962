"""How a policy's sequences are divided into micro-batches: by lengths, and by prompts where it shares these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo.trainer.batch import Batch, can_move, lengths
from grpo.trainer.microbatch import Microbatch, pack
from grpo.trainer.prefix_sharing import can_share, real_tokens


@dataclass(frozen=True)
class Packing:
    """What the division of a batch into micro-batches depends on, besides the batch."""

    hidden_size: int
    """Of the policy; the price of attention depends on it."""
    shares_prompts: bool
    """Whether completions of one prompt may go through the policy as one sequence."""
    multiple: int | None
    """Lengths are padded to a multiple of so many tokens."""

    @classmethod
    def of(cls, model: Any, share_prompts: bool, multiple: int | None) -> "Packing":
        """Return how the sequences of a policy are packed; prompts are shared if it allows and `share_prompts` does."""
        return cls(model.config.get_text_config().hidden_size, share_prompts and can_share(model), multiple)

    def divide(
        self, batch: Batch, rows: Sequence[int], tokens: int, weights: Sequence[float] | None = None
    ) -> list[Microbatch]:
        """Divide rows of a batch into micro-batches of at most so many tokens; see `grpo.trainer.microbatch.pack`."""
        prompts = None
        if self.shares_prompts and can_move(batch):
            prompts = real_tokens(batch["prompt_ids"], batch["prompt_mask"])
        return pack(*lengths(batch), tokens, rows, weights, prompts, self.hidden_size)
