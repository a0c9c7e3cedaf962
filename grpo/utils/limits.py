"""Numbers that the plan and the run share."""

from pathlib import Path

GB = 2**30
CONTEXT = 0.6 * GB
"""GPU memory of a process outside of PyTorch's allocator, in bytes: CUDA context and loaded kernels."""
USABLE = 0.9
"""The fraction of GPU memory that micro-batches and vLLM fill; the rest is for fragments and other programs."""
HOST_LIMIT = 0.95
"""The fraction of host memory above which a run stops itself before the system kills it."""
UNMEASURED = 1024
"""Tokens of a micro-batch where memory is not measured: on a CPU more at once are not faster."""
CACHED_LOGITS = 2**20
"""Logits that TRL's head computes at once on a CPU: with float32 copies of them they stay in its caches."""
PINNED_PIECE = 2**26
"""Bytes of a piece of page-locked memory: PyTorch rounds a tensor up to a power of two (`CachingHostAllocator.h`)."""
ENGINE = 1.5 * GB
"""Memory of vLLM beside weights and cache, in bytes: activations of a batch, CUDA graphs."""
HELD_BY_WSL = 2 * GB
"""GPU memory that WSL2 reports as free and does not give, in bytes: https://github.com/microsoft/WSL/issues/41176."""


def working_set(memory: float) -> float:
    """Return how much of a Mac's memory its GPU may use, in the unit of `memory`, GiB.

    Metal's `recommendedMaxWorkingSetSize`: up to macOS 14 two thirds of up to 32 GiB, and three quarters of more, as
    llama.cpp logs it on Macs; later versions allow a little more. On a Mac itself PyTorch tells the size.
    """
    return memory * (2 / 3 if memory <= 32 else 3 / 4)


def on_wsl(kernel: Path = Path("/proc/sys/kernel/osrelease")) -> bool:
    """Tell whether this is Linux inside of Windows (WSL2), by the name of its kernel."""
    return kernel.exists() and "microsoft" in kernel.read_text().lower()


def held_back() -> float:
    """Return the bytes of a GPU that its driver reports as free and does not give."""
    return HELD_BY_WSL if on_wsl() else 0
