"""How many processes a command line starts, or by how many it has been started."""

import os
import sys

from omegaconf import DictConfig

from grpo.config.batch import node_range
from grpo.config.nodes import with_nodes
from grpo.utils.distributed import BY_US, is_launched, machines, world_size
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import visible_gpus


def with_processes(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """Return a configuration and its overrides with the number of processes: for `auto`, or as torchrun started them.

    Among processes that `launch` has started for a range of machines, it is that for their number.

    Raises:
        ConfigError: there is no such number.
    """
    least, most = node_range(config)
    if least < most and is_launched():
        if BY_US not in os.environ:
            raise ConfigError(
                f"launch.nodes={config.launch.nodes}: {world_size()} processes have been started already, as by "
                "torchrun; leave it out"
            )
        config, overrides = with_nodes(config, overrides, machines())
    count, nodes = config.launch.processes, node_range(config)[0]
    if count == "auto" or (count == 1 and world_size() > nodes):
        gpus = [] if config.train.use_cpu else visible_gpus()
        count = world_size() // nodes if is_launched() else max(1, len(gpus))
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
    nodes, most = node_range(config)
    if sys.platform != "linux" and config.launch.processes * most > 1:
        raise ConfigError(f"launch.processes={config.launch.processes}: several processes need Linux")
    count, gpus = config.launch.processes, [] if config.train.use_cpu else visible_gpus()
    if is_launched():
        if count * nodes not in (1, world_size()):
            typed = f"launch.nodes={nodes} " if nodes > 1 else ""
            raise ConfigError(
                f"{typed}launch.processes={count}: {world_size()} processes have been started already, as by torchrun; "
                "leave it out"
            )
    elif gpus and count > len(gpus):
        raise ConfigError(f"launch.processes={count}: there are {len(gpus)} GPUs; launch.processes=auto takes them all")
