"""Builds the update of a trainer from its options."""

from functools import partial
from typing import Any

from grpo.trainer.compiled_layers import CompiledLayers
from grpo.trainer.update.finished_layers import FinishedLayers
from grpo.trainer.update.loss import loss_of_microbatch
from grpo.trainer.update.step_update import StepUpdate
from grpo.trainer.update.traits import LossTraits


def compiled_layers_of(trainer: Any, traits: LossTraits) -> CompiledLayers | None:
    """Return the decoder layers to compile; None where the update leaves them as they are."""
    asked, on_gpu = trainer.update.compile, trainer.accelerator.device.type == "cuda"
    if not traits.divisible or trainer.sharded or not (asked is True or (asked == "auto" and on_gpu)):
        return None
    return CompiledLayers(trainer.packing.shared_prompts, trainer.accelerator.autocast)


def step_update_of(trainer: Any, traits: LossTraits) -> StepUpdate:
    """Return the update of a trainer, which has its rollouts already."""
    finishes = trainer.accelerator.is_fsdp2 and traits.divisible and trainer.update.on_oom == "retry"
    finishes &= not trainer.update.activations_on_host
    return StepUpdate(
        trainer.update,
        traits,
        partial(loss_of_microbatch, trainer),
        accelerator=trainer.accelerator,
        budget=trainer.budget,
        packing=trainer.packing,
        memory=trainer.memory,
        guard=trainer.guard,
        longest=trainer.max_completion_length,
        sharded=trainer.sharded,
        survives=trainer.survives,
        compiled=trainer.compiled,
        finished=FinishedLayers() if finishes else None,
    )
