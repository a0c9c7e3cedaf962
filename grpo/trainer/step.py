"""The rows of an optimizer step as batches, and the micro-batches of these."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from grpo.trainer.batch import Batch, idle, join, lengths, longest, loss_mask
from grpo.trainer.microbatch import Microbatch
from grpo.trainer.step_metrics import StepMetrics


class Piece(NamedTuple):
    """A micro-batch of one of the step's batches."""

    batch: Batch
    part: Microbatch
    tokens: int
    """Tokens of the loss in it."""
    token_share: float
    """Their share in the tokens of the batch."""


def batches_of(slices: Sequence[Batch], mix: bool) -> list[tuple[Batch, int]]:
    """Return the step's rows as batches whose rows can be mixed, each with the number of TRL's slices in it.

    Rows mix within a generation, which shares its padding and its number of tokens; but not between TRL's slices where
    the loss is a mean over the tokens of a slice (`mix=False`).
    """
    if not mix:
        return [(part, 1) for part in slices]
    generations = defaultdict(list)
    for part in slices:
        generations[id(part["num_items_in_batch"])].append(part)
    return [(join(parts), len(parts)) for parts in generations.values()]


def worst_case(batches: Sequence[tuple[Batch, int]], completion_length: int) -> Piece:
    """Return the longest row that can come, as a micro-batch that adds nothing."""
    batch = max((batch for batch, _ in batches), key=lambda batch: max(lengths(batch)[0]))
    return Piece(*longest(batch, completion_length), 0, 0.0)


def nothing(batches: Sequence[tuple[Batch, int]]) -> Piece:
    """Return a cheap micro-batch that adds nothing."""
    return Piece(*idle(batches[0][0]), 0, 0.0)


def count(batches: Sequence[tuple[Batch, int]], pieces: Sequence[Piece], by_sequence: bool) -> StepMetrics:
    """Return the metrics of a step, before anything of it has been computed."""
    tokens = sum(int(loss_mask(batch).sum()) for batch, _ in batches)
    rows = sum(len(batch["prompt_ids"]) for batch, _ in batches)
    return StepMetrics(
        by_sequence=by_sequence,
        tokens=tokens,
        rows=rows,
        skipped=rows - sum(len(piece.part.rows) for piece in pieces if piece.part.weight),
        skipped_tokens=tokens - sum(piece.tokens for piece in pieces),
        microbatches=len(pieces),
        padded_tokens=sum(piece.part.tokens for piece in pieces),
    )
