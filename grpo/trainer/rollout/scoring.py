"""Log-probabilities of completions by the policy or its reference, in micro-batches under the token budget."""

from collections.abc import Callable
from typing import Any

import torch

from grpo.trainer.batch import Batch, lengths, take
from grpo.trainer.microbatch import Microbatch, too_long
from grpo.trainer.packing import Packing
from grpo.trainer.token_budget import TokenBudget
from grpo.utils.oom import smaller_until_it_fits

Scored = tuple[torch.Tensor, torch.Tensor | None]


def score_all(
    forward: Callable[[Batch, Microbatch], Any],
    batch: Batch,
    with_entropy: bool,
    packing: Packing,
    budget: TokenBudget,
    survives: Callable[[BaseException], bool],
) -> Scored:
    """Return log-probabilities and, if wanted, entropies of the completions, (rows, length); zero elsewhere, as in TRL.

    Args:
        forward: scores the inputs of a micro-batch.
        batch: prompts, completions, and their images.
        with_entropy: whether entropies are wanted.
        packing: how sequences become micro-batches.
        budget: tokens of a micro-batch.
        survives: whether to try again after an exception.
    """
    _, completions = lengths(batch)
    rows = [row for row, length in enumerate(completions) if length]
    logps = torch.zeros(batch["completion_ids"].shape, device=batch["completion_ids"].device)
    entropies = torch.zeros_like(logps) if with_entropy else None

    def score(part: Microbatch) -> None:
        inputs = take(batch, part, packing.multiple)
        width = inputs["completion_ids"].size(1)
        found = forward(inputs, part)
        logps[list(part.rows), :width] = found[0]
        if entropies is not None:
            entropies[list(part.rows), :width] = found[1]

    def shrink(failed: Microbatch | None) -> None:
        budget.halve(failed.tokens if failed else budget.tokens)

    smaller_until_it_fits(lambda: packing.divide(batch, rows, budget.tokens), score, shrink, too_long, survives)
    return logps, entropies
