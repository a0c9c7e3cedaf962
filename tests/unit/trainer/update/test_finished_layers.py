"""Layers that finish an update after an OOM; tests/e2e/test_sharded.py has them within FSDP2."""

from typing import Any

import pytest
import torch

from grpo.trainer.update.finished_layers import FinishedLayers


def test_a_frozen_layer_behind_frozen_inputs_has_no_gradient() -> None:
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    inputs = torch.ones(1, 2)
    output = FinishedLayers()._forward(layer, layer.forward, inputs)
    assert torch.equal(output, layer(inputs))
    assert not output.requires_grad


def test_a_layer_computes_as_before_and_zeros_after_an_oom() -> None:
    layer, layers, inputs = torch.nn.Linear(2, 2), FinishedLayers(), torch.ones(1, 2)
    layers._forward(layer, layer.forward, inputs).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.ones(2, 2))
    layer.zero_grad()

    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    output = layers._forward(layer, fails, inputs)
    assert not output.any()
    output.sum().backward()
    assert not layer.weight.grad.any()
    assert layers.error


def test_another_error_of_a_layer_is_raised() -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    layer = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="mat1"):
        FinishedLayers()._forward(layer, fails, torch.ones(1, 2))
