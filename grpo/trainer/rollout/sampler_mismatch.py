"""How far the distribution that the completions were sampled from is from the policy that learns of them.

The metrics have verl's names and formulas (its page "Rollout Correction"); a ratio is policy / sampler, of a token or,
by the product over its tokens, of a sequence. Means are over the tokens, or sequences, of all processes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.trainer.batch import Batch, loss_mask
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.stages import Stage

BOUND = 20.0
"""Largest absolute logarithm of a ratio that is exponentiated, nats, as in verl."""


class SamplerMismatch(Stage):
    """Logs divergences between the engine's log-probabilities and the policy's, where TRL corrects for them."""

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch, and log the divergences of all processes, and the fraction that TRL's mask removes."""
        batch = batch_of()
        names = ("old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio")
        policy, sampler, weights = (batch[name] for name in names)
        metrics = divergences(trainer.accelerator, policy, sampler, weights, loss_mask(batch))
        masked = metrics.pop("masked")
        if trainer.vllm_importance_sampling_mode.endswith("_mask"):
            trainer.note({"sampling/masked_share": masked})
        trainer.note({f"rollout_corr/{name}": value for name, value in metrics.items()})
        return batch


def divergences(
    accelerator: Any, policy: torch.Tensor, sampler: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """Return what `rollout_corr/` logs, and the fraction of weights that are masked, over all processes.

    Args:
        accelerator: of accelerate.
        policy: log-probabilities by the policy, (completions, length).
        sampler: by the engine, (completions, length); NaN where it gave none.
        weights: importance-sampling weights as they multiply the loss, 0 where masked; (completions, length), or
            (completions, 1) of sequences.
        mask: tokens in the loss, (completions, length).
    """
    weights = weights[mask.bool() if weights.shape == mask.shape else mask.any(1, keepdim=True)].double()
    scored = mask.bool() & ~sampler.isnan()
    policy, sampler = (torch.where(scored, scores.double(), 0.0) for scores in (policy, sampler))
    log_ratio, lengths = policy - sampler, scored.sum(1)
    rows = lengths > 0
    of_token, of_sequence = log_ratio[scored], log_ratio.sum(1)[rows]
    bounded = of_token.clamp(-BOUND, BOUND)
    log_ppl, log_sampler_ppl = (-scores.sum(1)[rows] / lengths[rows] for scores in (policy, sampler))
    values = {
        "kl": -of_token,
        "k3_kl": torch.expm1(bounded) - bounded,
        "chi2_token": torch.expm1(2 * bounded),
        "chi2_seq": torch.expm1(2 * of_sequence.clamp(-BOUND, BOUND)),
        "training_ppl": log_ppl.exp(),
        "rollout_ppl": log_sampler_ppl.exp(),
        "log_ppl_diff": log_ppl - log_sampler_ppl,
        "ppl_ratio": (log_ppl - log_sampler_ppl).exp(),
        "rollout_is_mean": weights,
        "squared": weights.square(),
        "masked": (weights == 0).double(),
    }
    sums = torch.stack([torch.stack((each.sum(), torch.ones_like(each).sum())) for each in values.values()])
    totals = accelerator.reduce(sums, "sum").tolist()
    means = {name: total / max(1.0, count) for name, (total, count) in zip(values, totals, strict=True)}
    squared = means.pop("squared")
    means["rollout_is_eff_sample_size"] = means["rollout_is_mean"] ** 2 / squared if squared else 0.0
    return means
