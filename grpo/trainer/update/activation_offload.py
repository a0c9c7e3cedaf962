"""Activations in host memory: the inputs of checkpointed layers leave the GPU in the forward pass.

With gradient checkpointing (1604.06174) a layer keeps its input alone. `ActivationOffload` copies it to page-locked
memory while the layer computes, and back while the layer after it goes through its backward pass. Copies change no bit.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo.trainer import trl
from grpo.utils.limits import PINNED_PIECE


@dataclass(eq=False)
class Activation:
    """The input of a layer."""

    host: list[torch.Tensor]
    """The copy in host memory, flat and in pieces: PyTorch rounds a page-locked tensor up to a power of two."""
    shape: torch.Size
    device: torch.device
    on_device: torch.Tensor | None = None
    """The flat tensor that is being copied, or the copy that has come back."""
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
        self.activations: list[Activation] = []
        """In the order of the forward pass."""

    @contextmanager
    def of(self, model: torch.nn.Module) -> Iterator[None]:
        """While inside, a forward pass offloads the inputs of checkpointed layers; the backward pass may be outside."""
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        with ExitStack() as stack:
            for layer in layers:
                if layer.gradient_checkpointing:
                    stack.enter_context(trl.checkpointed_by(layer, self._checkpoint))
            self.activations.clear()  # of a pass that an exception has ended
            yield

    def _checkpoint(self, checkpoint: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
        """Call a layer as `checkpoint` does; hooks see its inputs, because the checkpoint's own hooks see the rest."""
        with saved_tensors_hooks(self._offload, self._bring_back):
            return checkpoint(layer, *inputs)

    def _offload(self, tensor: torch.Tensor) -> Activation:
        flat = tensor.contiguous().view(-1)
        pieces = flat.split(PINNED_PIECE // flat.element_size())
        host = [torch.empty_like(piece, device="cpu", pin_memory=self.copies is not None) for piece in pieces]
        activation = Activation(host, tensor.shape, tensor.device)
        if self.copies and self.activations:  # whose layer has been computed meanwhile
            wait_and_free(self.activations[-1])
        self._copy(activation, flat, to_host=True)
        self.activations.append(activation)
        return activation

    def _bring_back(self, activation: Activation) -> torch.Tensor:
        if activation in self.activations:
            del self.activations[self.activations.index(activation) :]
        if activation.on_device is None:
            self._start_back(activation)
        flat = wait_and_free(activation)
        if self.copies and self.activations and self.activations[-1].on_device is None:
            self._start_back(self.activations[-1])
        return flat.view(activation.shape)

    def _start_back(self, activation: Activation) -> None:
        flat = torch.empty(activation.shape.numel(), dtype=activation.host[0].dtype, device=activation.device)
        self._copy(activation, flat, to_host=False)

    def _copy(self, activation: Activation, flat: torch.Tensor, to_host: bool) -> None:
        """Copy a tensor of the device to host memory, or back; on a GPU beside the work of the current stream."""
        if self.copies:
            self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for here, there in zip(flat.split(PINNED_PIECE // flat.element_size()), activation.host, strict=True):
                target, source = (there, here) if to_host else (here, there)
                target.copy_(source, non_blocking=True)
        if self.copies or not to_host:
            activation.on_device = flat
        if self.copies:
            activation.copied = self.copies.record_event()


def wait_and_free(activation: Activation) -> torch.Tensor:
    """Return the tensor on the device, which is complete for all further work of this stream, and no longer hold it."""
    tensor = activation.on_device
    assert tensor is not None
    if activation.copied:
        torch.cuda.current_stream().wait_event(activation.copied)
    activation.on_device = activation.copied = None
    return tensor
