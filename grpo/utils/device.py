"""The GPU that PyTorch computes on: of NVIDIA or AMD, which are both `torch.cuda`, or of a Mac (`torch.mps`)."""

from collections.abc import Sequence

import torch


def kind_of_device() -> str:
    """Return the kind of device that PyTorch has here: `cuda`, `mps` or `cpu`."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that it has been given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    elif device.type == "mps":
        torch.mps.synchronize()


def sent(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return integers in host memory on a device, int64, by a single copy that nobody waits for."""
    together = torch.cat([tensor.flatten() for tensor in tensors])
    if device.type == "cuda":  # which copies from other memory than page-locked one while the host waits
        together = together.pin_memory()
    parts = together.to(device, non_blocking=device.type == "cuda").split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def peaks() -> tuple[int, int]:
    """Return the most bytes that PyTorch has allocated, and reserved, on the GPU since `forget_peaks`.

    A Mac's allocator knows no peak; it keeps what is freed for later, so that both are what it holds.
    """
    if kind_of_device() == "mps":
        held = torch.mps.driver_allocated_memory()
        return held, held
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def forget_peaks() -> None:
    """Let `peaks` begin with what is allocated now; what a Mac's allocator holds stays."""
    if kind_of_device() != "mps":
        torch.cuda.reset_peak_memory_stats()


def memory_of_gpu() -> int:
    """Return the bytes of memory that PyTorch may allocate on the GPU of this process."""
    if kind_of_device() == "mps":
        return torch.mps.recommended_max_memory()
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
