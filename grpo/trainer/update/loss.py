"""The loss of a micro-batch: TRL's, or one of `grpo.losses` with log-probabilities, KL penalty, mean and metrics."""

from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch

from grpo.losses import Tokens
from grpo.trainer import trl
from grpo.trainer.batch import Batch, as_sequences, images_of, loss_mask
from grpo.trainer.processes import LocalAccelerator
from grpo.trainer.update import router_loss
from grpo.trainer.update.step import StepMicrobatch
from grpo.utils.patching import patched, replaced


def loss_of_microbatch(
    trainer: Any, model: Any, inputs: Batch, microbatch: StepMicrobatch, alone: bool
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """Return the loss of a micro-batch, and what TRL logs of it; see `grpo.trainer.update.step_update.Loss`.

    The entropy bonus is a mean over tokens whatever the policy loss is a mean of, but both get the micro-batch's
    weight.
    """
    with ExitStack() as within:
        metrics = within.enter_context(trl.own_metrics(trainer))
        within.enter_context(replaced(trainer, "part", microbatch.part))
        if alone:
            within.enter_context(replaced(trainer, "accelerator", LocalAccelerator(trainer.accelerator)))
            within.enter_context(patched("trl.trainer.grpo_trainer:nanmin", lowest))
            within.enter_context(patched("trl.trainer.grpo_trainer:nanmax", highest))
            weight, coefficient = microbatch.part.weight, trainer.entropy_coef * microbatch.token_fraction
            within.enter_context(replaced(trainer, "entropy_coef", coefficient / weight if weight else 0.0))
        if router_loss.FACTORS in inputs:
            within.enter_context(router_loss.divided_loss(inputs, microbatch.part))
        within.enter_context(trainer.compute_loss_context_manager())
        return trainer.compute_loss(model, inputs), metrics


def own_loss(trainer: Any, loss: ModuleType, model: Any, inputs: Batch) -> torch.Tensor:
    """Return the loss of a micro-batch, divided and logged as by TRL's `_compute_loss`."""
    ids, attention, length = as_sequences(inputs)
    mask = loss_mask(inputs)
    logps, entropies, router_loss = trl.score(
        trainer,
        model,
        ids,
        attention,
        length,
        compute_entropy=True,
        compute_aux_loss=trainer.aux_loss_enabled,
        **images_of(inputs),
    )
    tokens = tokens_of(inputs, logps)
    per_token, metrics = loss.per_token(tokens, trainer.args)
    metrics["entropy"] = entropies
    if trainer.beta:
        below = inputs["ref_per_token_logps"] - logps
        kl = below.exp() - below - 1
        if trainer.args.use_bias_correction_kl:
            kl = kl * (logps - tokens.old_logps).exp()
        per_token = per_token + trainer.beta * kl
        metrics["kl"] = kl
    training = trainer.model.training
    slices = trainer.current_gradient_accumulation_steps if training else 1
    total = (per_token * mask).sum()
    if loss.MEAN == "sequences":
        result = total / (len(ids) * trainer.max_completion_length) / slices
    else:
        generations = slices / trainer.args.steps_per_generation if training else 1
        counted = inputs["num_items_in_batch"].clamp(min=1) / trainer.accelerator.num_processes
        result = total / (counted * generations)
    for name, values in metrics.items():
        sums = torch.stack([(values.detach() * mask).sum(), mask.sum()]).float()
        sums = trainer.accelerator.reduce(sums, reduction="sum")
        trainer.note({name: (sums[0] / sums[1].clamp(min=1)).item()})
    extremes = (("low", "min", lowest), ("high", "max", highest))
    for name, of, extreme in extremes if "clip_ratio/low_mean" in metrics else ():
        of_each = (metrics[f"clip_ratio/{name}_mean"] * mask).sum(1) / mask.sum(1)
        trainer.note({f"clip_ratio/{name}_{of}": extreme(trainer.accelerator.gather(of_each)).item()})
    if trainer.aux_loss_enabled:
        trainer.note({"aux_loss": trainer.accelerator.gather_for_metrics(router_loss.detach()).mean().item()})
        result = result + trainer.router_aux_loss_coef * router_loss / slices
    return result


def lowest(values: torch.Tensor) -> torch.Tensor:
    """Return the smallest of some values that are not NaN, or NaN, as TRL's `nanmin`, without reading any."""
    unknown = values.isnan()
    return torch.where(unknown.all(), torch.nan, values.masked_fill(unknown, torch.inf).amin())


def highest(values: torch.Tensor) -> torch.Tensor:
    """Return the largest of some values that are not NaN, or NaN, likewise."""
    return -lowest(-values)


def tokens_of(inputs: Batch, logps: torch.Tensor) -> Tokens:
    """Return the completions of a micro-batch as a loss gets them, given their log-probabilities, (rows, length)."""
    old = inputs.get("old_per_token_logps", logps.detach())
    sampled = inputs.get("sampling_per_token_logps", old)
    return Tokens(
        logps,
        old,
        torch.where(sampled.isnan(), old, sampled),  # vLLM cannot score each token
        inputs.get("importance_sampling_ratio", 1.0),
        inputs["advantages"].view(len(logps), -1),
    )
