"""What Hydra's launchers and sweepers are told where their own defaults do not suit training."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.hardware import visible_cards

DAY = 24 * 60


def settle_launchers(config: DictConfig) -> None:
    """Put what suits training where a launcher or a sweeper has the default of its plugin, and nothing was typed."""
    cards = len(visible_cards())
    clustered = bool(OmegaConf.select(config, "hydra.launcher.ray.init.address"))
    local = config.hydra.launcher._target_.endswith("LocalLauncher")
    suits: list[tuple[str, Any, Any]] = [
        ("launcher.n_jobs", -1, max(1, cards)),  # joblib: one job for each GPU, not for each core
        ("launcher.timeout_min", 60, DAY),  # submitit
        ("launcher.gpus_per_node", None, cards if local else 1),
        ("launcher.ray.remote", {}, {"num_gpus": 1 if clustered else min(1, cards), "max_calls": 1}),
        ("sweeper.direction", "minimize", "maximize"),  # Optuna: of the accuracy
        ("sweeper.max_failure_rate", 0.0, 1.0),  # failed jobs are recorded, and the others run
        ("sweeper.sampler.seed", None, 0),  # the same command makes the same jobs, which `sweep.resume` can find
    ]
    typed = [text.lstrip("+").partition("=")[0] for text in config.hydra.overrides.hydra]
    for key, default, value in suits:
        section, _, name = f"hydra.{key}".rpartition(".")
        there = name in (OmegaConf.select(config, section) or {})
        if there and f"hydra.{key}" not in typed and is_same(OmegaConf.select(config, f"hydra.{key}"), default):
            OmegaConf.update(config, f"hydra.{key}", value)


def is_same(value: Any, default: Any) -> bool:
    """Whether a value is a default, also where it is a member of an enumeration or a mapping."""
    return getattr(value, "name", value) == default
