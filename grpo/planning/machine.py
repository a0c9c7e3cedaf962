"""The machine that a run is planned for."""

from dataclasses import dataclass

from omegaconf import DictConfig

from grpo.config.batch import processes
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import free_gpu_memory, host_memory
from grpo.utils.limits import GB


@dataclass
class Machine:
    """Memory of a machine, in bytes."""

    device: str
    """`cuda`, or `cpu` for a run without a GPU."""
    name: str
    """Name of the GPU, or a description of a machine without a GPU."""
    capacity: float
    """Free memory of the device, or the memory in its profile, bytes."""
    host: float | None
    """Host memory, bytes; None for another machine."""
    here: bool = True
    """Whether the plan is for this machine."""
    total: float = 0.0
    """Memory of the device in all, bytes: the base of vLLM's fraction."""


def machine_for(config: DictConfig) -> Machine:
    """Return the machine that a configuration is for: its GPU profile's, else the GPU here, else the CPU.

    Raises:
        ConfigError: the memory of the profile or `plan.host_gb` is not positive.
    """
    used, limit = host_memory()
    here = None if config.train.use_cpu else free_gpu_memory(processes(config))
    planned = None if config.plan.host_gb is None else config.plan.host_gb * GB
    if planned is not None and planned <= 0:
        raise ConfigError(f"plan.host_gb={config.plan.host_gb}: a positive number of GiB")
    if config.gpu is not None:
        if not config.gpu.memory_gb > 0:
            raise ConfigError(f"gpu.memory_gb={config.gpu.memory_gb}: the GPU's memory in GiB")
        capacity, name = config.gpu.memory_gb * GB, config.gpu.name
        if here and here[1] >= 0.9 * capacity:  # that GPU, or a larger one
            return Machine("cuda", name, min(capacity, here[2]), planned or limit, total=here[1])
        return Machine("cuda", name, capacity, planned, here=False, total=capacity)
    if here:
        return Machine("cuda", here[0], here[2], planned or limit, total=here[1])
    memory = planned or limit
    free = (planned or limit - used) / max(1, processes(config))
    return Machine("cpu", "this machine without a GPU", free, memory, total=memory)
