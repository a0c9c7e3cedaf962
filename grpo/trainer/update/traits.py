"""Traits of a loss that decide on its division into micro-batches."""

from dataclasses import dataclass
from typing import Any

from grpo.options import LOSS_MEANS, steps_in_backward
from grpo.trainer import trl


@dataclass(frozen=True)
class LossTraits:
    """Traits of a loss that decide on its division into micro-batches."""

    mean: str | None
    """Units that the loss is a mean over: `sequences`, `tokens`, or the tokens of a `generation`; None if they are not
    known, and the loss cannot be divided."""
    by_sequence: bool
    """Whether importance ratios, and so what is clipped, are of sequences."""
    entropy_bonus: bool
    penalty: bool
    """Whether there is a KL penalty."""
    router: bool = False
    """Whether routers have a loss, which acts on all tokens of a slice (`grpo.trainer.update.router_loss`)."""
    divisible: bool = True
    """Whether micro-batches add up to the loss; if not, TRL computes it at once."""

    @property
    def by_slice(self) -> bool:
        """Whether completions of TRL's slices cannot mix: the mean is over the tokens of a slice."""
        return self.mean == "tokens" or self.entropy_bonus


def traits_of(trainer: Any) -> LossTraits:
    """Return the traits of a trainer's loss."""
    mean = trainer.own_loss.MEAN if trainer.own_loss else LOSS_MEANS.get(trainer.loss_type)
    one_pass = trainer.top_entropy_quantile < 1.0 or mean is None
    one_pass |= trainer.aux_loss_enabled and trainer.sharded  # whose processes count together
    one_pass |= trainer.args.neftune_noise_alpha is not None  # whose noise is scaled by the length with padding
    return LossTraits(
        mean,
        trainer.importance_sampling_level == "sequence",
        trl.has_entropy_bonus(trainer),
        penalty=trainer.beta != 0.0,
        router=trainer.aux_loss_enabled,
        divisible=not (one_pass or steps_in_backward(trainer.args.optim) or trainer.args.n_gpu > 1),
    )
