"""Modes of a model and of PyTorch while a block runs: evaluation, and the order of compiled graphs."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """While inside, all modules within a model are in evaluation mode.

    The model itself keeps its mode, by which TRL tells training from evaluation.
    """
    with in_mode([module for module in model.modules() if module is not model], training=False):
        yield


@contextmanager
def in_mode(modules: Iterable[torch.nn.Module], training: bool) -> Iterator[None]:
    """While inside, modules are in training mode or in evaluation mode, each for itself."""
    modes = [(module, module.training) for module in modules]
    try:
        for module, _ in modes:
            module.training = training
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def oldest_graph_first() -> Iterator[None]:
    """While inside, a function that was compiled several times takes the first of its graphs that fits.

    PyTorch takes the one that was used last, which may be another when a checkpointed layer is computed again
    (pytorch#166926).
    """
    torch._C._dynamo.eval_frame._set_lru_cache(False)
    try:
        yield
    finally:
        torch._C._dynamo.eval_frame._set_lru_cache(True)
