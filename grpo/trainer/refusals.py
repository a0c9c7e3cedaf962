"""The facts of a script's trainer, and those that refuse it in one line."""

from typing import Any

from accelerate.utils import is_peft_model
from torch.nn import Module

from grpo.config.facts import Facts, generator_of
from grpo.config.rules import refusal
from grpo.options import Engine, Mixture, Rollout

VENDORS = {"cuda": "nvidia", "mps": "apple"}


def check_options(trainer: Any, engine: Engine, rollout: Rollout, mixture: Mixture | None) -> None:
    """Check the options of an `ExactGRPOTrainer`; the other arguments are its own.

    Args:
        trainer: with all that TRL's constructor sets, and `update` and `problems`.

    Raises:
        ValueError: two of them do not work together.
    """
    if reason := refusal(facts_of(trainer, engine, rollout, mixture)):
        raise ValueError(reason)


def facts_of(trainer: Any, engine: Engine, rollout: Rollout, mixture: Mixture | None) -> Facts:
    """Return the facts of a trainer; arguments as of `check_options`."""
    columns, device = getattr(trainer.problems, "column_names", None) or (), trainer.accelerator.device.type
    by_model = any(isinstance(func, Module) for func in trainer.reward_funcs)
    return Facts(
        train=trainer.args,
        update=trainer.update,
        engine=engine,
        rollout=rollout,
        processes=trainer.accelerator.num_processes,
        device=VENDORS.get(device, device),
        generator="script" if trainer.rollout_func is not None else generator_of(trainer.args),
        sharding=accelerator_sharding(trainer),
        adapter=is_peft_model(trainer.model),
        quantized=getattr(trainer.model, "is_quantized", False),
        images=not {"image", "images"}.isdisjoint(columns),
        mixture=mixture is not None,
        stream=not hasattr(trainer.problems or (), "__len__"),
        in_process=by_model or trainer.rollout_func is not None,
    )


def accelerator_sharding(trainer: Any) -> str | None:
    """Return how accelerate divides the weights of a trainer, as in `Facts`."""
    if trainer.is_fsdp_enabled:
        return "FSDP2"
    return f"ZeRO-{trainer.accelerator.state.deepspeed_plugin.zero_stage}" if trainer.is_deepspeed_enabled else None
