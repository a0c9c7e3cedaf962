"""LoRA that keeps its inputs as they are for the backward pass, once for all modules that read them.

PEFT casts the input of an adapted module to the adapter's float32. Autograd then keeps a float32 copy per module or,
where autocast rounds that back, a bfloat16 copy. A cast to float32 loses nothing: it is made again where it is needed.
"""

from typing import Any

import torch
from peft.tuners import lora


def keep_inputs_uncast(model: torch.nn.Module) -> None:
    """Let the adapters of a policy take inputs in the type of the base; all numbers stay the same.

    Dropout on a CPU rounds its mask to the input's type, and variants of LoRA compute with the input themselves: such
    modules stay as they are. Those on quantized weights keep their input already, under autocast (peft's lora/bnb.py).
    """
    for layer in model.modules():
        dropout = any(isinstance(part, torch.nn.Dropout) for part in getattr(layer, "lora_dropout", {}).values())
        if type(layer) is lora.Linear and not dropout and not layer.lora_variant:
            layer.cast_input_dtype_enabled = False
            for first in layer.lora_A.values():
                first.__class__ = FirstOfAdapter


class FirstOfAdapter(torch.nn.Linear):
    """The first matrix of an adapter, without a bias, for inputs of another type than its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return (…, rank) in the adapter's type, or in autocast's, of (…, width)."""
        if input.dtype == self.weight.dtype or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        return ProductOfCast.apply(input, self.weight)


class ProductOfCast(torch.autograd.Function):
    """The product of an input, cast to the type of a weight, with the weight; the input is kept without the cast."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        return torch.nn.functional.linear(input.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        input, weight = ctx.saved_tensors
        of_input = (gradient @ weight).to(input.dtype) if ctx.needs_input_grad[0] else None
        rows = input.flatten(0, -2).to(weight.dtype)
        return of_input, gradient.flatten(0, -2).T @ rows if ctx.needs_input_grad[1] else None
