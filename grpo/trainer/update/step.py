"""The completions of an optimizer step as batches, and the micro-batches of these."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from grpo.trainer.batch import Batch, idle, join, lengths, longest, loss_mask
from grpo.trainer.microbatch import Microbatch
from grpo.trainer.update.step_metrics import StepMetrics


@dataclass(frozen=True)
class StepMicrobatch:
    """A micro-batch of one of the step's batches."""

    batch: Batch
    part: Microbatch
    tokens: int
    """Tokens of the loss in it."""
    token_fraction: float
    """Their share in the tokens of the batch."""

    def __len__(self) -> int:
        """Return the number of completions."""
        return len(self.part)


def batches_of(slices: Sequence[Batch], mix: bool) -> list[tuple[Batch, int]]:
    """Return the completions of a step as batches in which they can be mixed, each with its number of TRL's slices.

    Completions of one generation mix, as they share padding and number of tokens; those of several slices do not where
    the loss is a mean over the tokens of a slice (`mix=False`).
    """
    if not mix:
        return [(part, 1) for part in slices]
    generations = defaultdict(list)
    for part in slices:
        generations[id(part["num_items_in_batch"])].append(part)
    return [(join(parts), len(parts)) for parts in generations.values()]


def worst_case(batches: Sequence[tuple[Batch, int]], completion_length: int) -> StepMicrobatch:
    """Return the longest possible sequence, as a micro-batch that adds nothing to the gradient."""
    batch = max((batch for batch, _ in batches), key=lambda batch: max(lengths(batch)[0]))
    return StepMicrobatch(*longest(batch, completion_length), 0, 0.0)


def nothing(batches: Sequence[tuple[Batch, int]]) -> StepMicrobatch:
    """Return a cheap micro-batch that adds nothing to the gradient."""
    return StepMicrobatch(*idle(batches[0][0]), 0, 0.0)


def count(
    batches: Sequence[tuple[Batch, int]], microbatches: Sequence[StepMicrobatch], by_sequence: bool
) -> StepMetrics:
    """Return the metrics of a step before its first micro-batch."""
    tokens = sum(int(loss_mask(batch).sum()) for batch, _ in batches)
    rows = sum(len(batch["prompt_ids"]) for batch, _ in batches)
    return StepMetrics(
        by_sequence=by_sequence,
        tokens=tokens,
        rows=rows,
        skipped=rows - sum(len(microbatch.part.rows) for microbatch in microbatches if microbatch.part.weight),
        skipped_tokens=tokens - sum(microbatch.tokens for microbatch in microbatches),
        microbatches=len(microbatches),
        padded_tokens=sum(microbatch.part.tokens for microbatch in microbatches),
    )
