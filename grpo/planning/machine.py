"""The machine that a run is planned for."""

from dataclasses import dataclass

import psutil
from omegaconf import DictConfig

from grpo.config.batch import processes
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import free_gpu_memory, host_memory, on_mac
from grpo.utils.limits import GB, working_set

LARGEST = 4096
"""GiB that no single GPU has."""


@dataclass
class Machine:
    """Memory of a machine, in bytes."""

    device: str
    """`cuda` (NVIDIA, AMD), `mps` (Apple), or `cpu` for a run without a GPU."""
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
    shared: float = 0.0
    """Memory that CPU and GPU share, bytes; 0 of a GPU with memory of its own."""


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
        return of_profile(config.gpu, here, planned, limit)
    if here:
        if on_mac():
            return Machine("mps", here[0], here[2], None, total=here[1], shared=float(psutil.virtual_memory().total))
        return Machine("cuda", here[0], here[2], planned or limit, total=here[1])
    memory = planned or limit
    free = (planned or limit - used) / max(1, processes(config))
    return Machine("cpu", "this machine without a GPU", free, memory, total=memory)


def of_profile(gpu: DictConfig, here: tuple[str, float, float] | None, planned: float | None, limit: float) -> Machine:
    """Return the machine with the GPU of a profile: this one, if its GPU has as much memory.

    Args:
        here: name, total and free bytes of the GPU of this machine, if there is one.
        planned: `plan.host_gb` in bytes, if it is given.
        limit: host memory of this machine, bytes.

    Raises:
        ConfigError: the memory of the profile is not that of a GPU.
    """
    if not 0 < gpu.memory_gb <= LARGEST:
        raise ConfigError(f"gpu.memory_gb={gpu.memory_gb}: the GPU's memory in GiB, above 0 and at most {LARGEST}")
    device, memory = ("mps" if gpu.vendor == "apple" else "cuda"), gpu.memory_gb * GB
    capacity = working_set(gpu.memory_gb) * GB if device == "mps" else memory
    shared, host = (memory, None) if gpu.shared else (0.0, planned or limit)
    if here and here[1] >= 0.9 * capacity:  # that GPU, or a larger one
        return Machine(device, gpu.name, min(capacity, here[2]), host, total=here[1], shared=shared)
    return Machine(device, gpu.name, capacity, None if shared else planned, here=False, total=capacity, shared=shared)
