"""The accelerator within a micro-batch, where no process waits for another."""

from typing import Any

import torch


class LocalAccelerator:
    """The accelerator as if this process were the only one: gathering and reducing return its own values.

    Processes have different micro-batches, and one may run out of memory: within a micro-batch, none waits for another.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return tensor

    gather_for_metrics = pad_across_processes = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor
