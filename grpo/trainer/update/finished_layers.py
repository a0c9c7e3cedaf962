"""Checkpointed layers that FSDP2 shards: they finish a micro-batch after an OOM, so that the step can be repeated.

All processes gather the weights of each layer together, and then reduce its gradients. A process that runs out of
memory in a layer therefore continues without computing: its layers return zeros and give gradients of zero, as long as
the others need its part of the weights. After the last micro-batch the processes agree whether any of them failed, drop
the gradients, and repeat the step from the same rollouts with half the tokens.

A layer computes within the reentrant function of `torch.utils.checkpoint`, inside FSDP2's hooks: neither its forward
pass nor its backward pass raises an OOM. What runs out of memory outside of the layers raises as before.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointFunction, checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.utils.oom import is_out_of_memory
from grpo.utils.patching import replaced

CACHES = ("past_key_values", "layer_past", "cache")
"""Arguments of layers for generation, which transformers' checkpointing drops, too."""


class FinishedLayers:
    """The layers of a policy while it is updated."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        """The OOM after which this process has not computed."""

    def failed(self, error: RuntimeError) -> None:
        """Note an OOM, and free the memory of its frames; other exceptions are raised."""
        if not is_out_of_memory(error):
            raise error
        self.error = error.with_traceback(None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """While inside, a forward pass and its backward pass finish."""
        with ExitStack() as stack:
            for layer in model.modules():
                is_sharded = isinstance(layer, FSDPModule) and isinstance(layer, GradientCheckpointingLayer)
                if is_sharded and layer.gradient_checkpointing and layer.training:
                    stack.enter_context(replaced(layer, "forward", partial(self._forward, layer, layer.forward)))
                    stack.enter_context(replaced(layer, "gradient_checkpointing", False))
            yield

    def _forward(self, layer: Any, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Compute a layer without keeping more than its inputs."""
        options = {name: None if name in CACHES else value for name, value in options.items()}
        options |= {"use_cache": False} if "use_cache" in options else {}
        run = partial(forward, **options)
        if not args or carries_gradient(options.values()):  # which the reentrant function would cut
            return checkpoint(run, *args, use_reentrant=False)
        # what is trained gets a gradient also behind inputs that need none, as the first layer with an adapter does
        anchor = torch.zeros((), requires_grad=any(weight.requires_grad for weight in layer.parameters()))
        return Finished.apply(self, layer, lambda anchor, *args: run(*args), anchor, *args)


def carries_gradient(values: Any) -> bool:
    """Return whether a gradient may flow to any of these arguments of a layer, or to what it writes into them."""
    for value in values:
        if isinstance(value, dict) or (isinstance(value, torch.Tensor) and value.requires_grad):
            return True
        if isinstance(value, list | tuple) and carries_gradient(value):
            return True
    return False


class Finished(torch.autograd.Function):
    """A layer that computes, or stands for one."""

    @staticmethod
    def forward(ctx: Any, layers: FinishedLayers, layer: torch.nn.Module, run: Any, *args: Any) -> Any:
        """Return the layer's output, or zeros."""
        ctx.layers, ctx.layer = layers, layer
        ctx.likes = [arg.new_zeros(()).expand(arg.shape) if isinstance(arg, torch.Tensor) else None for arg in args]
        try:
            if layers.error is None:
                return CheckpointFunction.forward(ctx, run, True, *args)
        except RuntimeError as error:
            layers.failed(error)
        return ctx.likes[1].clone(memory_format=torch.preserve_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients of the arguments, or zeros, and give the layer's weights gradients, or zeros."""
        try:
            if ctx.layers.error is None:
                return (None, *CheckpointFunction.backward(ctx, *gradients))
        except RuntimeError as error:
            ctx.layers.failed(error)
        for weight in ctx.layer.parameters():
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *(like if needs else None for like, needs in zip(ctx.likes, wanted, strict=True))
