"""The loss of the routers of a mixture of experts, divided into micro-batches.

For a slice of TRL's it is E times the sum over the E experts of f, the fraction of tokens that go to an expert, and P,
the mean probability of the expert (2101.03961, equations 4 to 6), over all layers. f has no gradient. Once a pass
without gradient has counted it, the loss is a sum over tokens, in which a prompt counts once per completion.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.batch import Batch, as_sequences, images_of, join, take
from grpo.trainer.microbatch import Microbatch, too_long
from grpo.utils.oom import smaller_until_it_fits
from grpo.utils.patching import patched, replaced

LOSS = "transformers.models.mixtral.modeling_mixtral:load_balancing_loss_func"
FACTORS = "router_factors"


def weigh(trainer: Any, model: Any, slices: Sequence[Batch]) -> None:
    """Give the completions of each slice the factors of their tokens' probabilities in its loss, (rows, 1, E)."""
    generations = {id(part["num_items_in_batch"]) for part in slices}
    for parts in [slices] if len(generations) == 1 else [[part] for part in slices]:
        assigned, tokens = count(trainer, model, join(parts))
        sizes = [len(part["prompt_ids"]) for part in parts]
        for part, of_experts, of_all in zip(parts, assigned.split(sizes), tokens.split(sizes), strict=True):
            factors = of_experts.size(1) * of_experts.sum(0) / of_all.sum() ** 2
            part[FACTORS] = factors.expand(len(of_all), 1, -1)


def count(trainer: Any, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each row that go to each expert, (rows, E), and all, (rows,), summed over layers."""
    packing, budget, rows = trainer.packing, trainer.budget, range(len(batch["prompt_ids"]))
    counts: dict[int, torch.Tensor] = {}

    def add(part: Microbatch) -> None:
        inputs = take(batch, part, packing.multiple)
        options = images_of(inputs) | {"compute_aux_loss": True}
        counting = partial(assignments, counts, part.rows, rows_of_tokens(inputs, part))
        with torch.no_grad(), replaced(trainer, "part", part), patched(LOSS, counting):
            trl.score(trainer, model, *as_sequences(inputs), **options)

    def shrink(failed: Microbatch | None) -> None:
        budget.halve(failed.tokens if failed else budget.tokens)

    smaller_until_it_fits(lambda: packing.divide(batch, rows, budget.tokens), add, shrink, too_long, trainer.survives)
    assigned = torch.stack([counts[row] for row in rows])
    return assigned[:, :-1], assigned[:, -1]


def divided_loss(inputs: Batch, part: Microbatch) -> AbstractContextManager[None]:
    """Return a context in which a micro-batch has its part of the loss, over its weight."""
    return patched(LOSS, partial(loss, rows_of_tokens(inputs, part) @ inputs[FACTORS][:, 0], part.weight))


def rows_of_tokens(inputs: Batch, part: Microbatch) -> torch.Tensor:
    """Return 1 where a token that goes through the policy is one of a row, (tokens, rows), else 0."""
    if not part.shared:
        mask = as_sequences(inputs)[1].float()
        return torch.diag_embed(mask.T).transpose(0, 1).flatten(0, 1)
    row, parts = 0, []
    for prompt, completions in part.groups:  # see `grpo.trainer.shared_prompts.layout`
        size = len(completions)
        ends = torch.tensor([1 + length for length in completions])
        of_group = torch.cat((torch.ones(prompt - 1, size), torch.eye(size).repeat_interleave(ends, 0)))
        parts.append(torch.nn.functional.pad(of_group, (row, len(part) - row - size)))
        row += size
    return torch.cat(parts).to(inputs["prompt_ids"].device)


def assignments(
    counts: dict[int, torch.Tensor],
    rows: Sequence[int],
    rows_of: torch.Tensor,
    gate_logits: Sequence[torch.Tensor],
    num_experts: int,
    top_k: int,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Note how many tokens of rows go to each expert, and how many there are, (E + 1,), over all layers.

    The last four arguments are those of transformers' function.
    """
    assigned = torch.zeros(len(rows_of), num_experts + 1, device=rows_of.device)
    assigned[:, -1] = len(gate_logits)
    for logits in gate_logits:
        experts = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1).indices
        assigned.scatter_add_(1, experts, torch.ones_like(experts, dtype=assigned.dtype))
    counts.update(zip(rows, rows_of.T @ assigned, strict=True))
    return torch.zeros((), device=rows_of.device)


def loss(factors: torch.Tensor, weight: float, gate_logits: Sequence[torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Return the loss of tokens whose probabilities have these factors, (tokens, E), over the micro-batch's weight."""
    total = torch.stack([(torch.softmax(logits, dim=-1).float() * factors).sum() for logits in gate_logits]).sum()
    return total / weight if weight else 0.0 * total
