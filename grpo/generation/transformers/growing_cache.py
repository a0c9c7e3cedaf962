"""A cache with room for the next tokens; transformers' copies all keys and values for each token."""

from collections.abc import Sequence
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionLayer

CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
"""Name of the cache among the inputs of a model: `cache` since transformers 5.24."""
STATES = ("conv_states", "recurrent_states")
"""Names of the states of a layer, by their numbers."""
ROOM = 16
"""Tokens that fit into a layer before its keys and values are copied again."""


class GrowingLayer(DynamicLayer):
    """Keys and values of a layer, in the first tokens of tensors that are longer."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens; return the keys and values of all tokens."""
        if not self.is_initialized:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys = appended(self.keys, key_states)
        self.values = appended(self.values, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, which may repeat."""
        if self.is_initialized:
            self.keys, self.values = rows_of(self.keys, indices), rows_of(self.values, indices)


class GrowingCache(DynamicCache):
    """The cache of a model with this configuration; layers with a window of tokens or a state are transformers'.

    Args:
        config: of the model; None for a cache without layers.
    """

    layers: list[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config=config and config.get_text_config(decoder=True))
        self.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, which may repeat."""
        for layer in self.layers:
            if isinstance(layer, LinearAttentionLayer):
                LinearAttentionLayer.reorder_cache(layer, indices)
            if isinstance(layer, DynamicLayer):
                layer.batch_select_indices(indices)

    def row(self, row: int, tokens: int) -> "GrowingCache":
        """Return a copy of a row, whose last columns are so many tokens."""
        one = GrowingCache(None)
        one.layers = [copy(layer) for layer in self.layers]
        for layer in one.layers:
            if isinstance(layer, LinearAttentionLayer):
                for kind in STATES:
                    setattr(layer, kind, states_of(getattr(layer, kind), row))
            if isinstance(layer, DynamicLayer) and layer.is_initialized:
                layer.keys = layer.keys[row : row + 1, :, -tokens:].clone()
                layer.values = layer.values[row : row + 1, :, -tokens:].clone()
                if layer.is_sliding:
                    layer.cumulative_length = tokens
        return one

    def join(self, before: "GrowingCache") -> None:
        """Put the rows of another cache, which loses them, before those of this one."""
        join([before, self])


def keeps_all_keys(model: Any) -> bool:
    """Return whether all layers of a model have the keys of all tokens, without a window, and no state."""
    return all(type(layer) is GrowingLayer for layer in GrowingCache(model.config).layers)


def join(caches: Sequence[GrowingCache]) -> GrowingCache:
    """Return the last cache with the rows of all, which the others lose, before its own."""
    for *earlier, layer in zip(*(cache.layers for cache in caches), strict=True):
        of_all = [*earlier, layer]
        if isinstance(layer, LinearAttentionLayer):
            for kind in STATES:
                join_states([getattr(of, kind) for of in of_all])
        if isinstance(layer, DynamicLayer) and layer.is_initialized:  # else its keys are those of an earlier layer
            layer.keys, layer.values = widened([of.keys for of in of_all], 2), widened([of.values for of in of_all], 2)
            for of in earlier:
                of.keys = of.values = None
            if layer.is_sliding:
                layer.cumulative_length = max(of.cumulative_length for of in of_all)
    return caches[-1]


def states_of(states: dict[int, torch.Tensor | None], row: int) -> dict[int, torch.Tensor | None]:
    """Return a copy of the states of a row."""
    return {number: state if state is None else state[row : row + 1].clone() for number, state in states.items()}


def join_states(of_all: Sequence[dict[int, torch.Tensor | None]]) -> None:
    """Put the rows of all states into the last, whose own come last."""
    for number, state in of_all[-1].items():
        if state is not None:
            of_all[-1][number] = torch.cat([states[number] for states in of_all])
            for states in of_all[:-1]:
                states[number] = None


def room_of(tensor: torch.Tensor) -> int:
    """Return how many tokens (rows, heads, length, size) has memory for, as its strides tell."""
    _, heads, length, size = tensor.shape
    room = tensor.stride(1) // size
    behind = length and tensor.stride() == (heads * room * size, room * size, size, 1)
    return room if behind else length


def with_room(tensor: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return so many tokens of (rows, heads, length, size), in the same memory."""
    rows, heads, _, size = tensor.shape
    return tensor.as_strided((rows, heads, tokens, size), tensor.stride(), tensor.storage_offset())


def appended(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return (rows, heads, length, size) with new tokens behind it: in its own memory if there is room."""
    rows, heads, length, size = tensor.shape
    total = length + new.size(2)
    if total > room_of(tensor):
        longer = tensor.new_empty(rows, heads, total + ROOM, size)
        longer[:, :, :length] = tensor
        tensor = longer
    joined = with_room(tensor, total)
    joined[:, :, length:] = new
    return joined


def rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return these rows of (rows, heads, length, size), with as much room behind them."""
    return with_room(tensor, room_of(tensor)).index_select(0, rows)[:, :, : tensor.size(2)]


def widened(tensors: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """Return tensors of some sequences each as one; those with fewer tokens are padded with zeros on the left.

    Args:
        tensors: of sequences and their tokens.
        tokens: the dimension of tokens: the last, after the sequences, or 2, if the sequences are the first.
    """
    most = max(tensor.size(tokens) for tensor in tensors)
    behind = (0, 0) if tokens == 2 else ()
    padded = [pad(tensor, (*behind, most - tensor.size(tokens), 0)) for tensor in tensors]
    return torch.cat(padded, 0 if tokens == 2 else -2)
