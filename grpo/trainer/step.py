"""A step, top to bottom."""

import time
from collections.abc import Callable
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.update import router_loss
from grpo.utils.errors import DoesNotFit

UNDIVIDED = (
    "its loss cannot be divided (top_entropy_quantile below 1, a sharded router's loss, an unknown loss_type, NEFTune, "
    "LOMO, layerwise optimizers)"
)


def step(trainer: Any, model: Any, inputs: Any) -> torch.Tensor:
    """Generate and score the rollouts of an optimizer step, and compute their gradient; return the loss.

    transformers calls it for each of the `gradient_accumulation_steps` slices of a step. After the last one it clips
    the gradient (`_clip_grad_norm`), has its norm checked (`_get_grad_norm`), and steps the optimizer.

    Args:
        trainer: an `ExactGRPOTrainer`.
        model: as accelerate has prepared it.
        inputs: rows of the data, or of the rollouts that TRL has buffered.
    """
    started = time.perf_counter()
    model.train()
    if callable(getattr(trainer.optimizer, "train", None)):  # schedule-free optimizers
        trainer.optimizer.train()

    # generate, score, advantages: `Rollouts.make`, which TRL calls once for several slices, or for several steps
    rollouts = trl.next_slice(trainer, inputs)
    if rollouts.pop("generated_at") == trainer.state.global_step:
        # the old policy is still the policy: its importance weight is 1, and not 1 but for the rounding between
        # two micro-batches, which in bfloat16 exceeds the clip range of GSPO
        rollouts.pop("old_per_token_logps", None)
    trainer.slices.append(rollouts)

    loss = torch.zeros((), device=trainer.accelerator.device)
    if trainer.accelerator.sync_gradients:
        # micro-batches, losses, backward: all slices of the step at once
        slices, trainer.slices = trainer.slices, []
        with trainer.memory.of("update"):
            grow = trainer.state.global_step > 0
            if trainer.aux_loss_enabled:
                router_loss.weigh(trainer, trainer.step_update.local(model), slices)
            entropies_again = trl.entropies_again(trainer)

            def restart() -> None:
                entropies_again()
                for watcher in trainer.watchers:
                    watcher.forget()

            loss, metrics = trainer.step_update.gradient(model, slices, restart, grow)
            trainer.clock.wait()
        trainer.note(metrics)

    every = trainer.args.torch_empty_cache_steps
    if every and trainer.state.global_step % every == 0:
        trainer.budget.release()
    trl.end_slice(trainer, time.perf_counter() - started)
    return loss


def undivided_step(
    trainer: Any, stock: Callable[..., torch.Tensor], model: Any, inputs: Any, num_items_in_batch: Any
) -> torch.Tensor:
    """Compute a step as TRL does; `stock` is its `training_step`.

    Raises:
        DoesNotFit: it has run out of memory, and cannot try again with less.
    """
    try:
        with trainer.memory.of("update"):
            return stock(model, inputs, num_items_in_batch)
    except RuntimeError as error:
        if not (trainer.rolled_out and trainer.survives(error)):
            raise
        raise DoesNotFit(
            f"the update does not fit into memory, and {UNDIVIDED}: lower per_device_train_batch_size and raise "
            "gradient_accumulation_steps, or do without"
        ) from error
