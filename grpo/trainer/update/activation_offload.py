"""Activations in host memory: the inputs of checkpointed layers leave the GPU in the forward pass.

With gradient checkpointing (1604.06174) a layer keeps its input alone. `ActivationOffload` copies it to page-locked
memory while the layer computes, and back while the layer after it goes through its backward pass. Copies change no bit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.utils.patching import replaced


@dataclass(eq=False)
class Activation:
    """The input of a layer."""

    host: torch.Tensor
    """The copy in host memory."""
    device: torch.device
    on_device: torch.Tensor | None = None
    """The tensor that is being copied, or the copy that has come back."""
    copied: torch.cuda.Event | None = None
    """Happens when the last copy is complete."""


class ActivationOffload:
    """Keeps the inputs of a policy's checkpointed layers in host memory from the forward to the backward pass.

    At most two of them are on the GPU: in the forward pass the input of a layer and that of the layer before it, in the
    backward pass the input of a layer and that of the next one that needs it. Both are allocated on the stream that
    computes, which waits for a copy before it frees or uses a tensor.

    Args:
        device: of the policy. On a CPU the inputs are copied within its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.kept: list[Activation] = []
        """In the order of the forward pass."""

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """While inside, a forward pass offloads the inputs of checkpointed layers; the backward pass may be outside."""
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        with ExitStack() as stack:
            for layer in layers:
                if layer.gradient_checkpointing:
                    checkpoint = partial(self._checkpoint, layer._gradient_checkpointing_func)
                    stack.enter_context(replaced(layer, "_gradient_checkpointing_func", checkpoint))
            self.kept.clear()  # of a pass that an exception has ended
            yield

    def _checkpoint(self, checkpoint: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
        """Call a layer as `checkpoint` does; hooks see its inputs, because the checkpoint's own hooks see the rest."""
        with saved_tensors_hooks(self._offload, self._bring_back):
            return checkpoint(layer, *inputs)

    def _offload(self, tensor: torch.Tensor) -> Activation:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self.copies is not None)
        activation = Activation(host, tensor.device)
        if self.copies is None:
            host.copy_(tensor)
        else:
            if self.kept:  # its layer has been computed meanwhile
                wait_and_free(self.kept[-1])
            activation.on_device, activation.copied = tensor, self._copy(host, tensor)
        self.kept.append(activation)
        return activation

    def _bring_back(self, activation: Activation) -> torch.Tensor:
        if activation in self.kept:
            del self.kept[self.kept.index(activation) :]
        if self.copies is None:
            return activation.host
        if activation.on_device is None:
            self._start_back(activation)
        tensor = wait_and_free(activation)
        if self.kept and self.kept[-1].on_device is None:
            self._start_back(self.kept[-1])
        return tensor

    def _start_back(self, activation: Activation) -> None:
        activation.on_device = torch.empty_like(activation.host, device=activation.device)
        activation.copied = self._copy(activation.on_device, activation.host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Start a copy that begins after all work so far; return the event of its end."""
        assert self.copies is not None
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            target.copy_(source, non_blocking=True)
        return self.copies.record_event()


def wait_and_free(activation: Activation) -> torch.Tensor:
    """Return the tensor on the device, which is complete for all further work of this stream, and no longer hold it."""
    tensor = activation.on_device
    assert tensor is not None
    assert activation.copied is not None
    torch.cuda.current_stream().wait_event(activation.copied)
    activation.on_device = activation.copied = None
    return tensor
