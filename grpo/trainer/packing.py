"""How a policy's sequences are divided into micro-batches: by lengths, and by prompts where it shares these.

A loss that cannot be divided is computed with the padding of its batch, and so are the log-probabilities that it
compares with the policy's: padding changes rounding, which cancels in the KL penalty of a policy that is its reference.
Policies whose log-probabilities depend on padding are computed with TRL's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo.trainer.batch import Batch, lengths
from grpo.trainer.microbatch import Microbatch, pack
from grpo.trainer.shared_prompts.layout import prompt_keys
from grpo.trainer.shared_prompts.trial import SharedPrompts


@dataclass(frozen=True)
class Packing:
    """Options of the division of a batch into micro-batches."""

    hidden_size: int
    """Hidden size of the policy; the price of attention depends on it."""
    shared_prompts: SharedPrompts
    """Tells whether completions of one prompt may go through the policy as one sequence."""
    multiple: int | None
    """Lengths are padded to a multiple of so many tokens."""
    divisible: bool
    """Whether micro-batches add up to the loss."""

    @property
    def trims(self) -> bool:
        """Whether a micro-batch has less padding than its batch: its own, or none with shared prompts."""
        return self.divisible and not self.shared_prompts.depends_on_padding()

    def divide(
        self, batch: Batch, rows: Sequence[int], tokens: int, weights: Sequence[float] | None = None
    ) -> list[Microbatch]:
        """Divide rows of a batch into micro-batches of at most so many tokens; see `grpo.trainer.microbatch.pack`."""
        if not self.trims:
            prompts, completions = ([ids.size(1)] * len(ids) for ids in (batch["prompt_ids"], batch["completion_ids"]))
            return pack(prompts, completions, tokens, rows, weights, hidden_size=self.hidden_size)
        keys = prompt_keys(batch) if self.shared_prompts.applies(batch) else None
        return pack(*lengths(batch), tokens, rows, weights, keys, self.hidden_size)
