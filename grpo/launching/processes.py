"""How many processes a command line starts, or by how many it has been started."""

import os
import sys

from omegaconf import DictConfig

from grpo.utils.distributed import is_launched, world_size
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import visible_gpus


def with_processes(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """Return a configuration and its overrides with the number of processes: for `auto`, or as torchrun started them.

    Raises:
        ConfigError: there is no such number.
    """
    count = config.launch.processes
    if count == "auto" or (count == 1 and world_size() > config.launch.nodes):
        gpus = [] if config.train.use_cpu else visible_gpus()
        count = world_size() // max(1, config.launch.nodes) if is_launched() else max(1, len(gpus))
        config, overrides = config.copy(), [*overrides, f"launch.processes={count}"]
        config.launch.processes = count
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"launch.processes={count}: a positive number, or auto for one per GPU")
    return config, overrides


def without_shard(config: DictConfig) -> DictConfig:
    """Return a configuration without `shard` if a file of `accelerate launch` configures the sharding."""
    if "true" not in (os.environ.get("ACCELERATE_USE_FSDP"), os.environ.get("ACCELERATE_USE_DEEPSPEED")):
        return config
    config = config.copy()
    config.train.fsdp = config.train.fsdp_config = config.train.deepspeed = None
    return config


def check_processes(config: DictConfig) -> None:
    """Check that this machine can run as many processes, or that they are those that have been started.

    Raises:
        ConfigError: it cannot, or they are not; or a limit makes no sense.
    """
    for key, least in (("max_restarts", 0), ("timeout", 1)):
        if config.launch[key] < least:
            raise ConfigError(f"launch.{key}={config.launch[key]}: a number from {least}")
    if sys.platform != "linux" and config.launch.processes * config.launch.nodes > 1:
        raise ConfigError(f"launch.processes={config.launch.processes}: several processes need Linux")
    count, gpus = config.launch.processes, [] if config.train.use_cpu else visible_gpus()
    if is_launched():
        if count * config.launch.nodes not in (1, world_size()):
            nodes = f"launch.nodes={config.launch.nodes} " if config.launch.nodes > 1 else ""
            raise ConfigError(
                f"{nodes}launch.processes={count}: {world_size()} processes have been started already, as by torchrun; "
                "leave it out"
            )
    elif gpus and count > len(gpus):
        raise ConfigError(f"launch.processes={count}: there are {len(gpus)} GPUs; launch.processes=auto takes them all")
