"""Losses that TRL lacks, a file each: `train.loss_type=dppo` is `grpo/losses/dppo.py`.

The docstring of a file has the source of the loss and the meaning of the options of `train`. The file has

- `MEAN`: the set over which the losses of the tokens are averaged: all tokens of a `generation`, as in DAPO, or the
  `sequences`, each counted with `max_completion_length` tokens, as in Dr. GRPO; a mean over the tokens of each
  completion, as TRL's `grpo` has, cannot be chosen;
- `per_token`, from a `Tokens` and the `GRPOConfig` to the loss of each token, (completions, tokens), and to metrics: by
  name a number or a truth value per token, of which the trainer logs the mean. A loss with TRL's correction for the
  engine multiplies by `tokens.correction`;
- `advantage_factor`, if it scales advantages itself, and required `OPTIONS` of `train`, whose other values are refused;
  see `maxrl.py`.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

NAMES = sorted(file.stem for file in Path(__file__).parent.glob("[a-z]*.py"))
"""Values of `loss_type` that are files of this package."""
MEANS = ("generation", "sequences")
PLAIN = {
    "importance_sampling_level": "token",
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "off_policy_mask_threshold": None,
    "delta": None,
}
"""Options that act on TRL's losses alone, with the values at which they do nothing."""


class Tokens(NamedTuple):
    """The completions of a micro-batch."""

    logps: "Tensor"
    """Log-probabilities by the policy, (completions, tokens)."""
    old_logps: "Tensor"
    """By the policy as it was at the generation, likewise."""
    sampled_logps: "Tensor"
    """Log-probabilities by the sampler of the tokens, which is the engine if vLLM generates; same shape."""
    correction: "Tensor | float"
    """TRL's importance-sampling ratio between these two, (completions, tokens or 1); 1 without correction."""
    advantages: "Tensor"
    """(completions, 1)."""


def find(loss_type: str) -> ModuleType | None:
    """Return the module of a loss; None for TRL's losses."""
    return importlib.import_module(f"{__name__}.{loss_type}") if loss_type in NAMES else None


def why_not(train: Any) -> str | None:
    """Return why a loss of this package does not work with the other options of `train`; None if it does."""
    loss = find(train.loss_type)
    if loss is None:
        return None
    mean = getattr(loss, "MEAN", None)
    if mean not in MEANS or not callable(getattr(loss, "per_token", None)):
        needs = f"it needs a function per_token and MEAN={' or '.join(map(repr, MEANS))}"
        return f"loss_type={train.loss_type}: {Path(str(loss.__file__)).name} has MEAN={mean!r}; {needs}"
    for key, plain in (PLAIN | getattr(loss, "OPTIONS", {})).items():
        if getattr(train, key) != plain:
            text = str(plain).lower() if isinstance(plain, bool) else "null" if plain is None else plain
            return f"{key}={getattr(train, key)}: train.loss_type={train.loss_type} needs train.{key}={text}"
    return None
