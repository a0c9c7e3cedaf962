"""What machine is this: devices and memory."""

import resource

import torch
from omegaconf import DictConfig

from grpo.config import ConfigError


def describe() -> str:
    """Return the accelerators of this machine in words."""
    cards = [
        f"{torch.cuda.get_device_name(i)} with {torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GB"
        for i in range(torch.cuda.device_count())
    ]
    return ", ".join(cards) or "no NVIDIA GPU"


def check_gpu(gpu: DictConfig | None) -> None:
    """Check that this machine has what a `+gpu=` profile was made for, before anything is loaded.

    A card may report a little less than its nominal memory, so 10 % are forgiven.

    Raises:
        ConfigError: naming what was found and how to go on without that card.
    """
    if gpu is None:
        return
    here = max((torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())), default=0)
    lacking = "" if here >= 0.9 * gpu.memory_gb * 2**30 else f"{gpu.memory_gb:g} GB"
    if not lacking and gpu.bf16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        lacking = "bfloat16"
    if lacking:
        raise ConfigError(
            f"+gpu: the profile is for {gpu.name} ({lacking} needed), found here: {describe()}. Look at its choices "
            "with --cfg job, try them here anyway with plan.enforce=false, or leave +gpu out to run the embedded task"
        )


def peak_memory() -> dict[str, float]:
    """Return the highest memory use so far in GB (2**30 bytes): of this process and, if there is one, of the GPU."""
    readings = {"memory/host_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        readings["memory/peak_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return readings
