"""The policy's log-probabilities over the tokens that a sampling filter has kept, for the correction of vLLM's.

TRL's importance ratio is the policy's probability of a token over that of the engine that drew it. Where top-k, top-p
or min-p kept a set K of tokens, the engine's is normalized over K, and so has to be the policy's:

    ratio = pi(token) / pi(K) : mu(token) / mu(K)

The expectation over what the engine draws is then that over what the policy would draw under the same filter, as if it
had generated itself. All else, the ratio to the old policy, the KL penalty, the gradient, is of all tokens, as TRL's is
beside transformers' generation with a filter.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trl.trainer import utils

from grpo.generation.kept_tokens import as_tensor
from grpo.trainer import trl
from grpo.trainer.batch import Batch, loss_mask
from grpo.trainer.processes import own_part
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.stages import Stage
from grpo.utils.patching import patched

AT_ONCE = 2**24
"""Numbers of the rows of the head that are multiplied at once."""

WIDTHS = (32, 256)
"""Numbers of kept tokens: those with fewer are scored without room for the most that any has."""


class TruncatedSampling(Stage):
    """Has TRL correct the ratio of policy and engine over the tokens that a filter has kept."""

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch, whose log-probabilities are over all tokens again; log the mean probability of those kept.

        Raises:
            GenerationError: the engine does not tell which ones it has kept.
        """
        kept_tokens = as_tensor([completion.logps or [] for completion in own_part(trainer.accelerator, completions)])
        log_mass = list[torch.Tensor]()

        def first_over_kept(
            score: Any, model: Any, ids: torch.Tensor, mask: torch.Tensor, length: int, *args: Any, **options: Any
        ) -> Any:
            if log_mass or "kept_tokens" in options:  # the first scores of rollouts are the policy's
                return score(model, ids, mask, length, *args, **options)
            padded = torch.nn.functional.pad(kept_tokens, (0, 0, 0, length - kept_tokens.size(1)), value=-1)
            options |= {"kept_tokens": padded, "compute_entropy": True}
            logps, mass, _ = score(model, ids, mask, length, *args, **options)
            log_mass.append(mass)
            return logps - mass, None, None

        with trl.scored_by(trainer, first_over_kept):
            batch = batch_of()
        for name in ("old_per_token_logps", "sampling_per_token_logps"):
            batch[name] = batch[name] + log_mass[0]
        mask = loss_mask(batch)
        sums = torch.stack(((log_mass[0].exp() * mask).sum(), mask.sum()))
        total, count = trainer.accelerator.reduce(sums, "sum").tolist()
        trainer.note({"sampling/kept_mass": total / max(1.0, count)})
        return batch


@contextmanager
def mass_of(kept_tokens: torch.Tensor) -> Iterator[None]:
    """While inside, TRL's head returns the log-probability of kept tokens together in the place of the entropy.

    Args:
        kept_tokens: of each token that is scored, in this order, padded with -1, (tokens, most).
    """
    stock, place = utils._ChunkedLogProbFunction, 0

    class Head:
        """TRL's, with another second output."""

        @staticmethod
        def apply(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor, *options: Any) -> tuple:
            nonlocal place
            outputs = stock.apply(hidden, weight, bias, targets, *options)
            ids, place = kept_tokens[place : place + len(hidden)], place + len(hidden)
            temperature, _, softcap, scale, _ = options
            mass, counts, before = torch.zeros_like(outputs[0]), (ids >= 0).sum(1), 0
            for most in (*(width for width in WIDTHS if width < ids.size(1)), ids.size(1)):
                (rows,) = ((counts > before) & (counts <= most)).nonzero(as_tuple=True)
                for part in rows.split(AT_ONCE // (most * hidden.size(1)) or 1):
                    scored = hidden[part], ids[part, :most], targets[part]
                    mass[part] = outputs[0][part] - over(*scored, weight, bias, temperature, softcap, scale)
                before = most
            return outputs[0], mass, *outputs[2:]

    with patched("trl.trainer.utils:_ChunkedLogProbFunction", Head):
        yield


def over(
    hidden: torch.Tensor,
    kept_tokens: torch.Tensor,
    targets: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> torch.Tensor:
    """Return the log-probability of tokens over kept ones, (tokens); meaningless where none is.

    Args:
        hidden: last hidden states, (tokens, width).
        kept_tokens: as of `mass_of`, with the target among them.
        targets: the tokens, (tokens).
        weight: of the head, (vocabulary, width).
        bias: of the head, (vocabulary).
        temperature: that logits are divided by.
        softcap: as `final_logit_softcapping` of a model.
        scale: that logits are multiplied by before that.
    """
    there, ids = kept_tokens >= 0, kept_tokens.clamp(min=0).long()
    logits = torch.einsum("tkw,tw->tk", weight[ids].float(), hidden.float())
    if bias is not None:
        logits = logits + bias[ids]
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    target = logits.masked_fill(ids != targets[:, None], -torch.inf).amax(1)
    return target - logits.masked_fill(~there, -torch.inf).logsumexp(1)
