"""The resolved configuration of a run, with the choices of the plan and TRL's defaults."""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.batch import processes
from grpo.config.library import GRPO_CONFIG, library_fields
from grpo.config.schema import PLANNED
from grpo.config.transport import Transport, transport_of
from grpo.options import Engine, Rollout, Update


@dataclass(frozen=True)
class Resolved:
    """The groups of a configuration as it is run. Functions get those that they need."""

    config: DictConfig
    """All of it, read-only; written to `resolved_config.yaml`."""
    model: DictConfig
    task: DictConfig
    reward: DictConfig
    peft: DictConfig | None
    train: DictConfig
    plan: DictConfig
    update: Update
    engine: Engine
    rollout: Rollout
    completions: DictConfig
    transport: Transport
    """Adapter, merged or shared weights for vLLM, if vLLM generates."""
    processes: int
    """Number of processes that train."""

    @classmethod
    def of(cls, config: DictConfig, transport: Transport) -> "Resolved":
        """Return the resolved groups of a configuration."""
        OmegaConf.set_readonly(config, True)
        return cls(
            config,
            config.model,
            config.task,
            config.reward,
            config.peft,
            config.train,
            config.plan,
            Update(**config["update"]),  # `.update` is a method
            Engine(**config.engine),
            Rollout(**config.rollout),
            config.completions,
            transport,
            processes(config),
        )


def resolve(config: DictConfig, plan: Any) -> Resolved:
    """Return a composed and checked configuration with the plan's choices for this machine.

    Args:
        plan: plan of the configuration (`grpo.planning.fit.Plan`); None if it could not be planned.
    """
    config = config.copy()
    train, update = config.train, config["update"]
    settings = plan.settings if plan and plan.here else {}
    if plan and plan.here and not plan.unified and update.max_tokens_per_microbatch == "auto":
        update.max_tokens_per_microbatch = settings["update.max_tokens_per_microbatch"]
    if update.compile == "auto" and not settings.get("update.compile", True):  # the trainer knows its device and shards
        update.compile = False
    for name in PLANNED:
        if train[name] is None:
            train[name] = settings.get(f"train.{name}", library_fields(GRPO_CONFIG)[name][1])
    if config.rollout.completions_at_once is None:
        config.rollout.completions_at_once = settings.get("rollout.completions_at_once")
    transport = transport_of(config, plan.family if plan else None)
    if train.use_vllm and not transport.adapter:
        config.engine.lora = "merged"
    if config.engine.share_weights == "auto":
        config.engine.share_weights = settings.get("engine.share_weights", False)
    return Resolved.of(config, transport)
