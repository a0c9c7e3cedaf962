"""Peak of the memory of this process, or of its GPU. Needs torch alone."""

import ctypes
import gc
from pathlib import Path

import torch


def reset_peak() -> float:
    """Reset the peak of the memory and return the memory in use, GiB."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**30
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return read_peak()


def read_peak() -> float:
    """Return the peak of the memory in use, GiB."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 2**20
