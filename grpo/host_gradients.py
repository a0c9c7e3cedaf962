"""Gradients that wait in host memory, so that a full fine-tuning needs no second copy of its weights on the card.

As soon as the backward pass has a weight's gradient, it is added to a sum in host memory and freed; the optimizer gets
the sums back one by one. Sums are computed on the device in the gradients' own type: the result is bitwise the same.
"""

import types

import torch


class HostGradients:
    """The gradients of a model's weights, for an optimizer of these."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.memory: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.waiting: set[torch.nn.Parameter] = set()  # those whose sum is of this step
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
            gradient += self.memory[weight].to(gradient.device)
        elif weight not in self.memory:
            self.memory[weight] = torch.empty_like(gradient, device="cpu")
            if gradient.is_cuda:  # locks the pages, for quick transfers; `pin_memory` would take up to twice as much
                torch.cuda.cudart().cudaHostRegister(self.memory[weight].data_ptr(), gradient.nbytes, 0)
        self.memory[weight].copy_(gradient)
        self.waiting.add(weight)

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the sums so that their norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

        Returns:
            The norm before, a scalar.
        """
        sums = {weight: self.memory[weight] for weight in self.weights if weight in self.waiting}
        norms = [torch.linalg.vector_norm(self._back(weight)).cpu() for weight in sums]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if torch.isfinite(norm):
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            for gradient in sums.values():
                gradient *= scale
        return norm

    def drop(self) -> None:
        """Forget the gradients of this step."""
        self.waiting.clear()

    def _back(self, weight: torch.nn.Parameter) -> torch.Tensor:
        return self.memory[weight].to(weight.device)

    def _step_one_by_one(self) -> None:
        for weight in self.weights:
            if weight in self.waiting:
                weight.grad = self._back(weight)
                self._step()
                weight.grad = None
        self.drop()
