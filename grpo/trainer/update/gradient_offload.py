"""Gradients offloaded to CPU, so that a full fine-tuning needs no second copy of its weights on the GPU.

As soon as the backward pass has a weight's gradient, it is added to a sum in CPU memory and freed; the optimizer gets
the sums back one by one. Sums are computed on the device in the gradients' own type: the result is bitwise the same.
"""

import types
from collections.abc import Sequence

import torch

SLAB = 2**30
"""Bytes that are page-locked at once: PyTorch's allocator would round each weight up to a power of two."""


class OffloadedGradients:
    """The gradients of a model's weights, in CPU memory, for an optimizer of these."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.memory = cpu_memory_for(self.weights)
        self.waiting: set[torch.nn.Parameter] = set()  # those whose sum is of this step
        self.scale: torch.Tensor | float = 1.0  # that clipping has found for this step
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self._take)
        self._step = optimizer.step

        def step(optimizer: torch.optim.Optimizer, closure: None = None) -> None:
            self._step_one_by_one()

        optimizer.step = types.MethodType(step, optimizer)

    def _take(self, weight: torch.nn.Parameter) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None, "the hook runs when there is one"
        if weight in self.waiting:
            gradient += self._back(weight)
        self.memory[weight].copy_(gradient)
        self.waiting.add(weight)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm is at most `max_norm`, as `clip_grad_norm_` of PyTorch does.

        Returns:
            The norm before, a scalar.
        """
        waiting = [weight for weight in self.weights if weight in self.waiting]
        norms = [torch.linalg.vector_norm(self._back(weight)).cpu() for weight in waiting]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self.scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def drop(self) -> None:
        """Drop the gradients of this step."""
        self.waiting.clear()
        self.scale = 1.0

    def _back(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return self.memory[weight].to(weight.device)

    def _step_one_by_one(self) -> None:
        for weight in self.weights:
            if weight in self.waiting:
                weight.grad = self._back(weight).mul_(self.scale)
                self._step()
                weight.grad = None
        self.drop()


def cpu_memory_for(weights: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return CPU memory of the shape and type of each weight, page-locked for quick transfers from a GPU."""
    memory = {}
    left = sum(weight.nbytes + 64 for weight in weights)
    slab = torch.empty(0, dtype=torch.uint8)
    for weight in weights:
        size = -(-weight.nbytes // 64) * 64  # aligned for any type
        if slab.numel() < size:
            slab = torch.empty(max(size, min(SLAB, left)), dtype=torch.uint8, pin_memory=weight.is_cuda)
        memory[weight] = slab[: weight.nbytes].view(weight.dtype).view(weight.shape)
        slab = slab[size:]
        left -= size
    return memory
