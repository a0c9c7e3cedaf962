"""Evaluation mode for all that samples and scores."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """While inside, all modules within a model are in evaluation mode.

    The model itself keeps its mode, by which TRL tells training from evaluation.
    """
    modes = [(module, module.training) for module in model.modules() if module is not model]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
