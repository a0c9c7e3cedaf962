"""A stand-in for the driver's CUDA graphs on a CPU: it notes operators while a step is recorded, and repeats them.

As on a GPU, nothing is computed while it records, no number reaches the host, and what Python computed stays as it was.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    *(torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default),
    *(torch.ops.aten.nonzero.default, torch.ops.aten.equal.default),
}


class Recorder(TorchDispatchMode):
    """Notes operators with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Compute, note, and keep what is overwritten."""
        if function in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        kwargs = kwargs or {}
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.append((value, value.clone()))
        result = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, result))
        return result


class Graph:
    """As `torch.cuda.CUDAGraph`."""

    recorded: int = 0
    replayed: int = 0
    capturing = False

    def pool(self) -> tuple[int, int]:
        """Return the place of the memory."""
        return (0, 1)

    def capture_begin(self, pool: tuple[int, int] | None, capture_error_mode: str) -> None:
        """Begin to note operators."""
        assert capture_error_mode == "thread_local"
        self.recorder, Graph.capturing = Recorder(), True
        self.recorder.__enter__()

    def capture_end(self) -> None:
        """Undo what has been computed: a GPU computes nothing while it records."""
        self.recorder.__exit__(None, None, None)
        for tensor, before in reversed(self.recorder.before):
            tensor.copy_(before)
        Graph.recorded, Graph.capturing = Graph.recorded + 1, False

    def replay(self) -> None:
        """Compute the operators again, with the same memory."""
        Graph.replayed += 1
        for function, args, kwargs, result in self.recorder.calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and address(old) != address(new):
                    old.copy_(new)


def address(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; views share it."""
    return tensor.untyped_storage().data_ptr()
