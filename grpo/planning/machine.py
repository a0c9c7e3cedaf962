"""The memory that a run will find."""

from dataclasses import dataclass

from omegaconf import DictConfig

from grpo.errors import ConfigError
from grpo.hardware import free_card_memory, host_memory
from grpo.limits import GB
from grpo.planning.from_config import processes


@dataclass
class Machine:
    """The memory that a run will find, in bytes."""

    device: str
    """`cuda`, or `cpu` for a run without a GPU."""
    name: str
    capacity: float
    """What is free of it, or what the profile says."""
    host: float | None
    """None where the run will be on another machine."""
    here: bool = True
    """Whether this is the machine at hand."""
    card: float = 0.0
    """The whole of the memory, which vLLM's share is a share of."""


def machine_for(config: DictConfig) -> Machine:
    """Return the machine that a configuration is for: the card of its profile, else the card here, else the CPU.

    Raises:
        ConfigError: the profile's card has no memory.
    """
    used, limit = host_memory()
    here = None if config.train.use_cpu else free_card_memory()
    planned = None if config.plan.host_gb is None else config.plan.host_gb * GB
    if planned is not None and planned <= 0:
        raise ConfigError(f"plan.host_gb={config.plan.host_gb}: a positive number of GB")
    if config.gpu is not None:
        if not config.gpu.memory_gb > 0:
            raise ConfigError(f"gpu.memory_gb={config.gpu.memory_gb}: how many GB the card has")
        capacity, name = config.gpu.memory_gb * GB, config.gpu.name
        if here and here[1] >= 0.9 * capacity:  # that card, or a larger one
            return Machine("cuda", name, min(capacity, here[2]), planned or limit, card=here[1])
        return Machine("cuda", name, capacity, planned, here=False, card=capacity)
    if here:
        return Machine("cuda", here[0], here[2], planned or limit, card=here[1])
    share = max(1, processes(config))
    memory = planned or limit
    return Machine("cpu", "this machine without a GPU", (planned or limit - used) / share, memory, card=memory)
