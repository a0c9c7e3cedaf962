"""Whether the engine that generates has the policy's weights: its log-probabilities beside the policy's.

Both score the same tokens, so that they differ by rounding alone. Rollouts of other weights than those that are trained
raise no error anywhere: the reward only rises less, or falls.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.batch import Batch, as_sequences, images_of, loss_mask, pick
from grpo.trainer.processes import any_of
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.stages import Stage
from grpo.utils.errors import GenerationError

log = logging.getLogger(__name__)

EVERY = 50
"""Steps between two checks, which begin with the first rollouts of a run and of each continuation."""
COMPLETIONS = 8
"""Completions that are compared, of each process."""
ON_CPU = 5e-4
"""Nats per token that float32 on a CPU stays below."""
TOLERANCE = {"FP8": 0.5, "bfloat16": 0.15, "float16": 0.02, "float32": 0.02}
"""Nats per token, as a mean of absolute differences, that rounding stays below, merged adapters included.

More than three times what SmolLM2-135M shows in bfloat16 (measured at ea0c705); float16 has three bits more.
GPUs may multiply float32 as TF32, which has float16's bits. With weights in FP8 per channel beside a bfloat16 policy
SmolLM2-135M shows 0.16 (`+experiment=smollm2 engine.quantization=fp8_per_channel`).
"""


class EngineCheck(Stage):
    """Compares the engine's log-probabilities of some rollouts with the policy's, now and then.

    What a script's `rollout_func` returns is its own affair: a difference is worth a warning.

    Args:
        dtype: in which the engine computes: `float32`, `bfloat16` or `float16`.
        device: `cuda` or `cpu`.
        of_script: whether the rollouts are those of a `rollout_func`.
        filtered: whether the engine's log-probabilities are of other tokens than the policy's.
    """

    def __init__(self, dtype: str, device: str, of_script: bool, filtered: bool = False) -> None:
        self.dtype, self.allowed, self.of_script = dtype, tolerance(dtype, device), of_script
        self.next = math.inf if filtered else 0
        """The next step whose rollouts are compared."""

    def assemble(self, trainer: Any, completions: Sequence[Completion], batch_of: Callable[[], Batch]) -> Batch:
        """Return the batch; compare its log-probabilities where the policy has not changed since, and one is due."""
        batch = batch_of()
        if trainer.model.training:
            trainer.note(trainer.vllm_generation.metrics())
            if all(completion.policy == trainer.state.global_step for completion in completions):
                trainer.note(self.compare(trainer, batch))
            trainer.vllm_generation.checked = False  # of the policy after the update
        return batch

    def compare(self, trainer: Any, batch: Batch) -> dict[str, float]:
        """Return the metrics of a comparison; none while none is due.

        Raises:
            GenerationError: the engine has other weights than the policy.
        """
        step, engine = trainer.state.global_step, batch.get("sampling_per_token_logps")
        if engine is None or step < self.next:
            return {}
        self.next = step + EVERY
        count = len(batch["prompt_ids"])
        rows = pick(batch, range(0, count, -(-count // COMPLETIONS)))
        with torch.no_grad():
            policy, _, _ = trl.score(trainer, trainer.model, *as_sequences(rows), batch_size=1, **images_of(rows))
        gap = difference(policy, rows["sampling_per_token_logps"], loss_mask(rows))
        written = trainer.vllm_generation.changed_weights()
        (differs,) = any_of(trainer.accelerator, not gap <= self.allowed or bool(written))
        metrics = {
            "engine/logp_difference": gap,
            "engine/tolerance": self.allowed,
            "engine/is_policy": float(not differs),
        }
        if differs:
            reason = not_the_policy(gap, self.allowed, self.dtype, written)
            if not self.of_script:
                trainer.log(metrics)
                raise GenerationError(reason)
            self.next = math.inf
            log.warning("rollout_func: %s", reason)
        return metrics


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


def not_the_policy(gap: float, allowed: float, dtype: str, written: Sequence[str] = ()) -> str:
    """Return the reason for ending a run whose engine has other weights, or has had them written to.

    Args:
        written: weights that it shares with the policy, and that something has changed.
    """
    if written:
        return f"{len(written)} frozen weights that the policy shares with vLLM were written to, first {written[0]}"
    return (
        f"the engine is not the policy: their log-probabilities differ by {gap:.2g} nats per token, and rounding in "
        f"{dtype} makes less than {allowed:g}; its weights are not those that are trained: a server with another model "
        "or started again, an adapter that was not merged, a vLLM version that loads these weights otherwise"
    )
