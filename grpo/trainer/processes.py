"""Communication between processes, and the accelerator within a micro-batch, where none waits for another."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def any_of(accelerator: Any, *flags: bool) -> list[bool]:
    """Return which of these is true on any process."""
    if accelerator.num_processes == 1:
        return list(flags)
    mine = torch.tensor(flags, dtype=torch.int, device=accelerator.device)
    return [bool(count) for count in accelerator.reduce(mine, "sum").tolist()]


def of_all(accelerator: Any, number: int) -> list[int]:
    """Return the number of each process."""
    return accelerator.gather(torch.tensor([number], device=accelerator.device)).tolist()


def own_part(accelerator: Any, of_all: Sequence[T]) -> Sequence[T]:
    """Return this process's part of a sequence that is divided equally over all processes."""
    size, rest = divmod(len(of_all), accelerator.num_processes)
    assert rest == 0
    return of_all[accelerator.process_index * size :][:size]


class ReadLater(torch.Tensor):
    """A tensor, and all that is computed from it, which `item` does not read, so that nobody waits for a GPU."""

    def item(self) -> Any:  # TRL writes what it returns into its metrics
        return self.detach().as_subclass(torch.Tensor)


def read(metrics: Sequence[dict[str, list[Any]]]) -> list[dict[str, list[float]]]:
    """Return metrics with numbers in the place of scalars on the device, which are read all at once."""
    scalars = [value for of in metrics for values in of.values() for value in values if isinstance(value, torch.Tensor)]
    numbers = iter(torch.stack([scalar.float() for scalar in scalars]).tolist() if scalars else ())
    return [
        {
            name: [next(numbers) if isinstance(value, torch.Tensor) else value for value in values]
            for name, values in of.items()
        }
        for of in metrics
    ]


class LocalAccelerator:
    """The accelerator as if this process were the only one: gathering and reducing return its own values.

    Processes have different micro-batches, and one may run out of memory: within a micro-batch, none waits for another,
    nor for its GPU: what is gathered or reduced for metrics is a `ReadLater`.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        return tensor.as_subclass(ReadLater)

    gather_for_metrics = pad_across_processes = gather

    def reduce(self, tensor: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return tensor.as_subclass(ReadLater)
