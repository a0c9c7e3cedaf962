"""Options that do not work together, each in one line."""

from typing import Any

from torch.nn import Module

from grpo import losses
from grpo.config.options import TILES_NEED_WHOLE_WEIGHTS, Engine, Rollout, why_not_updated
from grpo.utils.diagnosis import why_biased, why_not_best_of, why_not_generated, why_not_stale


def check_options(trainer: Any, engine: Engine, rollout: Rollout) -> None:
    """Check the options of an `ExactGRPOTrainer`.

    Args:
        trainer: with all that TRL's constructor sets, and `update` and `problems`.
        engine: the `engine` group of the configuration.
        rollout: the `rollout` group.

    Raises:
        ValueError: two of them do not work together.
    """
    check_update(trainer)
    check_rollouts(trainer, engine, rollout)


def check_update(trainer: Any) -> None:
    """Check the options of the update; raises as `check_options`."""
    if reason := losses.why_not(trainer.args):
        raise ValueError(f"train.{reason}")
    if reason := why_not_updated(trainer.args, trainer.update, trainer.accelerator.num_processes):
        raise ValueError(reason)
    if trainer.args.fp16 and trainer.accelerator.device.type in ("cpu", "mps"):
        raise ValueError("fp16=True: on this device accelerate does not scale the loss; use float32, or bf16=True")
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    if trainer.update.mlp_tile and plugin and plugin.zero_stage == 3:
        raise ValueError(TILES_NEED_WHOLE_WEIGHTS)


def check_rollouts(trainer: Any, engine: Engine, rollout: Rollout) -> None:
    """Check the options of rollouts; arguments and errors as of `check_options`."""
    columns = getattr(trainer.problems, "column_names", None) or ()
    images = not {"image", "images"}.isdisjoint(columns)
    by_model = trainer.rollout_func is not None or any(isinstance(func, Module) for func in trainer.reward_funcs)
    traits = {"images": images, "in_process": by_model}
    if engine.staleness and (reason := why_not_stale(trainer.args, **traits)):
        raise ValueError(f"engine.staleness={engine.staleness}: {reason}")
    if reason := why_not_best_of(trainer.args, rollout):
        raise ValueError(reason)
    by_vllm = trainer.use_vllm and trainer.rollout_func is None
    if by_vllm and (reason := why_not_generated(trainer.args) or why_biased(trainer.args)):
        raise ValueError(reason)
