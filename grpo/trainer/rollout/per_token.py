"""Log-probabilities of completions by the policy or its reference, in micro-batches under the token budget."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.batch import Batch, as_batch, as_sequences, images_of, lengths, take
from grpo.trainer.microbatch import Microbatch, too_long
from grpo.trainer.packing import Packing
from grpo.trainer.rollout.truncated_sampling import mass_of
from grpo.trainer.shared_prompts import scoring as shared_prompts
from grpo.trainer.token_budget import TokenBudget
from grpo.utils.device import sent
from grpo.utils.limits import CACHED_LOGITS
from grpo.utils.modes import without_dropout
from grpo.utils.oom import smaller_until_it_fits
from grpo.utils.patching import patched, replaced

Scores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Log-probabilities and entropies, (rows, length), and the auxiliary loss of a router."""
Sequences = tuple[torch.Tensor, torch.Tensor, int]
"""Tokens and mask, (rows, prompt and completion), and the length of the completions."""


def score(
    trainer: Any,
    part: Microbatch | None,
    stock: Callable[..., Scores],
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    **options: Any,
) -> Scores:
    """Score completions as TRL's `_get_per_token_logps_and_entropies`, whose arguments these are.

    Without a gradient it is done in micro-batches under the token budget, and without dropout. With `kept_tokens`, see
    `mass_of` in `grpo.trainer.rollout.truncated_sampling`, the entropies are log-probabilities of these together.

    Args:
        trainer: an `ExactGRPOTrainer`.
        part: the micro-batch that these completions are; None if they are to be divided into some.
        stock: TRL's method.
    """
    stock, sequences = partial(stock, batch_size=batch_size), (input_ids, attention_mask, logits_to_keep)
    if part is not None or torch.is_grad_enabled():
        return forward(trainer, part, stock, model, sequences, **options)
    with without_dropout(model):
        if options.get("compute_aux_loss") or trainer.sharded:
            return forward(trainer, None, stock, model, sequences, **options)
        return in_microbatches(trainer, model, sequences, **options)


def in_microbatches(
    trainer: Any,
    model: Any,
    sequences: Sequences,
    compute_entropy: bool = False,
    compute_aux_loss: bool = False,
    **fields: Any,
) -> Scores:
    """Score completions in micro-batches under the token budget, each by the trainer's own method."""
    batch = {key: value for key, value in fields.items() if value is not None} | as_batch(*sequences)

    def of_part(inputs: Batch, part: Microbatch) -> Any:
        arguments = images_of(inputs) | {"kept_tokens": inputs.get("kept_tokens"), "compute_entropy": compute_entropy}
        with replaced(trainer, "part", part):
            return trl.score(trainer, model, *as_sequences(inputs), **arguments)

    def scores() -> Scores:
        compiled = trainer.compiled.on(model) if trainer.compiled and model is trainer.model else nullcontext()
        with trainer.clock.of("logprobs", trainer.model.training), trainer.memory.of("logprobs"), compiled:
            return *score_all(of_part, batch, compute_entropy, trainer.packing, trainer.budget, trainer.survives), None

    try:
        return scores()
    except RuntimeError as error:
        if not (trainer.compiled and trainer.compiled.gives_up(error)):
            raise
    return scores()


def forward(
    trainer: Any,
    part: Microbatch | None,
    stock: Callable[..., Scores],
    model: Any,
    sequences: Sequences,
    kept_tokens: torch.Tensor | None = None,
    **options: Any,
) -> Scores:
    """Score completions in one pass, with shared prompts where a micro-batch has any, or as TRL does."""
    _, attention_mask, length = sequences
    scored = attention_mask[:, -length:] != 0
    with ExitStack() as within:
        within.enter_context(trl.head_scores(only_labels=True))
        if attention_mask.device.type not in ("cuda", "xpu"):
            tokens = min(4096, max(1, int(scored.sum())))  # of a tile, as TRL takes them
            within.enter_context(patched("trl.trainer.utils:_CHUNKED_LOGPROB_CHUNK_SIZE", CACHED_LOGITS // tokens))
        if kept_tokens is not None:  # in host memory, but for those of this pass
            within.enter_context(mass_of(kept_tokens[scored.to(kept_tokens.device)].to(attention_mask.device)))
        if part is None or not part.shared:
            return stock(model, *sequences, **options)
        options.pop("compute_entropy", None)
        with trainer.accelerator.autocast():
            return shared_prompts.score(model, *sequences, part.groups, **options)


def score_all(
    forward: Callable[[Batch, Microbatch], Any],
    batch: Batch,
    with_entropy: bool,
    packing: Packing,
    budget: TokenBudget,
    survives: Callable[[BaseException], bool],
) -> tuple[torch.Tensor, torch.Tensor | None]:
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
        scores = forward(inputs, part)
        (places,) = sent([torch.tensor(part.rows)], logps.device)
        logps[places, :width] = scores[0]
        if entropies is not None:
            entropies[places, :width] = scores[1]

    def shrink(failed: Microbatch | None) -> None:
        budget.halve(failed.tokens if failed else budget.tokens)

    smaller_until_it_fits(lambda: packing.divide(batch, rows, budget.tokens), score, shrink, too_long, survives)
    return logps, entropies
