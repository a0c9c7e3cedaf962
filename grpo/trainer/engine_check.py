"""Whether the engine that generates has the policy's weights: its log-probabilities beside the policy's.

Both score the same tokens, so that they differ by rounding alone. Rollouts of other weights than those that are trained
raise no error anywhere: the reward only rises less, or falls.
"""

from collections.abc import Sequence

import torch

EVERY = 50
"""Steps between two checks, which begin with the first rollouts of a run and of each continuation."""
COMPLETIONS = 8
"""Completions that are compared, of each process."""
ON_CPU = 5e-4
"""Nats per token that float32 on a CPU stays below."""
TOLERANCE = {"bfloat16": 0.15, "float16": 0.02, "float32": 0.02}
"""Nats per token, as a mean of absolute differences, that rounding stays below, merged adapters included.

More than three times what SmolLM2-135M shows in bfloat16 (benchmarks/engine_check.json); float16 has three bits more.
GPUs may multiply float32 as TF32, which has float16's bits.
"""


def tolerance(dtype: str, device: str) -> float:
    """Return the difference in nats per token that rounding alone may make.

    Args:
        dtype: in which the engine computes: `float32`, `bfloat16` or `float16`.
        device: `cuda` or `cpu`.
    """
    return ON_CPU if (dtype, device) == ("float32", "cpu") else TOLERANCE[dtype]


def difference(policy: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean absolute difference of log-probabilities, nats per token; 0 without a token that both scored.

    Args:
        policy: log-probabilities by the policy, (completions, length).
        engine: by the engine, (completions, length); NaN where it gave none.
        mask: tokens that the policy has generated, (completions, length).
    """
    scored = mask.bool() & ~engine.isnan()
    return float((policy - engine)[scored].abs().mean()) if scored.any() else 0.0


def masked(ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return how many sequences, or tokens, TRL's mask of extreme importance ratios removes, and of how many, (1, 2).

    Args:
        ratio: 0 where it is masked, (completions, length), or (completions, 1) where sequences are.
        mask: tokens in the loss, (completions, length).
    """
    counted = mask.bool() if ratio.shape == mask.shape else mask.any(1, keepdim=True)
    return torch.stack((((ratio == 0) & counted).sum(), counted.sum())).unsqueeze(0)


def not_the_policy(found: float, allowed: float, dtype: str, written: Sequence[str] = ()) -> str:
    """Return the reason for ending a run whose engine has other weights, or has had them written to.

    Args:
        written: weights that it shares with the policy, and that something has changed.
    """
    if written:
        return f"{len(written)} frozen weights that the policy shares with vLLM were written to, first {written[0]}"
    return (
        f"the engine is not the policy: their log-probabilities differ by {found:.2g} nats per token, and rounding in "
        f"{dtype} makes less than {allowed:g}; its weights are not those that are trained: a server with another model "
        "or started again, an adapter that was not merged, a vLLM version that loads these weights otherwise"
    )
