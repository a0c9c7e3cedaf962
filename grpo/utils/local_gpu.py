"""The GPU of this machine as its driver, or PyTorch where the driver says less, describes it."""

from dataclasses import dataclass

import psutil

from grpo.utils.hardware import build_of_pytorch, described_gpus, free_gpu_memory, on_mac, visible_gpus

BFLOAT16 = 8.0
"""NVIDIA's compute capability from which on GPUs multiply in bfloat16."""


@dataclass(frozen=True)
class LocalGpu:
    """A GPU that a run on this machine would use."""

    name: str
    memory: float
    """Bytes; of a slice (MIG) its own; of a Mac all memory, which CPU and GPU share."""
    vendor: str
    """`nvidia`, `amd` or `apple`."""
    compute: str
    """NVIDIA's compute capability (`8.6`), or AMD's LLVM target (`gfx942`); empty of others."""
    bf16: bool
    shared: bool
    """Whether CPU and GPU share the memory."""
    is_slice: bool
    """Whether the device is a part of a GPU (MIG)."""
    count: int
    """Number of GPUs that this process may use."""
    several: bool
    """Whether several of them train."""


def local_vendor() -> str:
    """Return the maker of the GPUs that PyTorch on this machine is built for; `nvidia` of a build for CPUs too."""
    if on_mac():
        return "apple"
    return "amd" if build_of_pytorch().get("hip") else "nvidia"


def local_gpu(several: bool = False) -> LocalGpu | None:
    """Return the GPU that a run on this machine would use; None without one.

    Args:
        several: whether several GPUs train, of which the one with the least free memory counts.
    """
    here = free_gpu_memory(2 if several else 1)
    if here is None:
        return None
    (name, total, _), count = here, len(visible_gpus())
    if local_vendor() == "apple":
        return LocalGpu(name, float(psutil.virtual_memory().total), "apple", "", True, True, False, 1, several)
    by_driver = [gpu for gpu in described_gpus().values() if gpu.total and gpu.name == name and gpu.compute]
    if by_driver:
        compute = by_driver[0].compute
        return LocalGpu(name, total, "nvidia", compute, float(compute) >= BFLOAT16, False, False, count, several)
    import torch

    facts, vendor = torch.cuda.get_device_properties(0), local_vendor()
    compute = facts.gcnArchName.partition(":")[0] if vendor == "amd" else f"{facts.major}.{facts.minor}"
    bf16, is_slice = torch.cuda.is_bf16_supported(including_emulation=False), " MIG " in name
    return LocalGpu(name, total, vendor, compute, bf16, bool(facts.is_integrated), is_slice, count, several)
