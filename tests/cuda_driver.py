"""A CUDA driver for a build of PyTorch without one: `torch.cuda` itself, with its checks of arguments, is real."""

from types import SimpleNamespace

import pytest
import torch

GB = 2**30


class CudaDriver:
    """What `torch._C` answers where there is a GPU: of 16 GiB, with what a test says is allocated."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = 0
        self.fraction = 1.0
        self.total = 16 * GB
        self.synchronized = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of the one that is not there."""
        names = {
            "_cuda_getDeviceCount": lambda: 1,
            "_cuda_getDevice": lambda: 0,
            "_cuda_memoryStats": self.stats,
            "_cuda_resetPeakMemoryStats": self.reset,
            "_cuda_getMemoryFraction": self.memory_fraction,
            "_cuda_synchronize": self.synchronize,
            "_cuda_emptyCache": lambda: None,
        }
        for name, value in names.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            monkeypatch.setattr(torch.cuda, name, lambda index: index)
        monkeypatch.setattr(torch.cuda, "_initialized", True)
        monkeypatch.setattr(torch.cuda, "_cached_device_count", None)  # else later tests would count this GPU
        monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
        monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        stream = SimpleNamespace(is_capturing=lambda: False)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: stream)
        properties = SimpleNamespace(total_memory=self.total, name="a GPU")
        monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda index: properties, raising=False)

    def stats(self, index: int) -> dict[str, object]:
        assert type(index) is int
        sizes = {"current": self.allocated, "peak": self.peak}
        reserved = {"current": self.reserved, "peak": self.reserved}
        return {"allocated_bytes": {"all": sizes}, "reserved_bytes": {"all": reserved}}

    def reset(self, index: int) -> None:
        assert type(index) is int
        self.peak = self.allocated

    def memory_fraction(self, index: int) -> float:
        assert type(index) is int
        return self.fraction

    def synchronize(self) -> None:
        self.synchronized += 1

    def allocate(self, bytes_: int) -> None:
        """Allocate as much, or free a negative number of bytes."""
        self.allocated += bytes_
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.peak)
