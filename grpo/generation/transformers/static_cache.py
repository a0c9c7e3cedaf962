"""A cache whose memory stays in place while a GPU repeats a recorded step, with each prompt once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

from grpo.generation.transformers.growing_cache import STATES, GrowingCache, join_states, widened
from grpo.generation.transformers.prompt_cache import PromptCache, PromptLayer, PromptMask, bias

MULTIPLE = 16
"""Lengths of masks are multiples of it, as the kernel reads 16 bytes at once."""


class StaticLayer(PromptLayer):
    """Keys and values of prompts, and of completions with room for more tokens, (rows, heads, room, size).

    With a window of tokens, the room is no longer than the window, and the next token replaces the oldest.

    Args:
        read: layer of the cache of the prompts.
    """

    next_tokens: tuple[torch.Tensor, torch.Tensor]
    """Rows, and how many tokens of each are in the cache."""

    def __init__(self, read: Any) -> None:
        super().__init__(read)
        missing = -self.prompt_keys.size(2) % MULTIPLE
        self.prompt_keys = pad(self.prompt_keys, (0, 0, missing, 0))
        self.prompt_values = pad(self.prompt_values, (0, 0, missing, 0))
        self.keys, self.values = self.keys[:0], self.values[:0]
        self.is_sliding = read.is_sliding
        self.window = read.sliding_window if read.is_sliding else None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a token of each row; return the keys and values of completions, with the room behind them."""
        rows, lengths = self.next_tokens
        places = lengths % self.keys.size(2) if self.window else lengths
        self.keys[rows, :, places] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, places] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys, self.values

    def of_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a completion's tokens, as a layer without a window has them."""
        length = int(self.next_tokens[1][row])
        return self.keys[row, :, :length], self.values[row, :, :length]

    def place(self, rows: list[int], lengths: torch.Tensor, room: int) -> None:
        """Place keys and values in new memory; the arguments are those of `StaticCache.place`."""
        room = min(room, self.window + -self.window % MULTIPLE) if self.window else room
        for name in ("keys", "values"):
            before: torch.Tensor = getattr(self, name)
            after = before.new_zeros(len(lengths), before.size(1), room, before.size(3))
            after[: len(rows), :, : before.size(2)] = before[rows]
            setattr(self, name, after)
        self.next_tokens = (torch.arange(len(lengths), device=lengths.device), lengths)


class StaticStateLayer(LinearAttentionLayer, StaticLayer):
    """A `StaticLayer` that has states, too."""

    def __init__(self, read: Any) -> None:
        LinearAttentionLayer.__init__(self, read.number_of_states)
        self.__dict__ |= read.__dict__
        StaticLayer.__init__(self, read)


def static(read: Any) -> Any:
    """Return a layer like one of the cache of the prompts; the memory of states is in place anyway."""
    if not isinstance(read, LinearAttentionLayer):
        return StaticLayer(read)
    return StaticStateLayer(read) if hasattr(read, "keys") else read


class StaticCache(PromptCache):
    """The cache of completions in a batch whose rows change only when it is placed anew.

    Args:
        read: the cache of the prompts, without completions yet; its memory may become that of this one.
        seen: which tokens of the prompts are no padding, (prompts, tokens).
    """

    layers: list[Any]
    lengths: torch.Tensor
    """Tokens of each row in the cache, (rows)."""
    room = 0
    """Tokens of a completion that fit in."""

    def __init__(self, read: GrowingCache, seen: torch.Tensor) -> None:
        super(PromptCache, self).__init__(None)
        self.layers = [static(layer) for layer in read.layers]
        self.seen = pad(seen.bool(), (-seen.size(1) % MULTIPLE, 0))
        self.lengths = seen.new_zeros(0)

    def add(self, prompts: list[int], further: "StaticCache") -> None:
        """Keep some prompts, and put those of another cache behind them."""
        for layer, of_others in zip(self.layers, further.layers, strict=True):
            if isinstance(layer, StaticLayer):
                for name in ("prompt_keys", "prompt_values"):
                    setattr(layer, name, widened([getattr(layer, name)[prompts], getattr(of_others, name)], 2))
            if isinstance(layer, LinearAttentionLayer):
                for kind in STATES:
                    states = getattr(layer, kind)
                    further_states = getattr(of_others, kind)
                    join_states([states, further_states])
                    setattr(layer, kind, further_states)
        self.seen = widened([self.seen[prompts], further.seen], -1)

    def place(self, rows: list[int], prompt_of: Sequence[int], lengths: torch.Tensor, room: int) -> None:
        """Place completions in new memory.

        Args:
            rows: rows to keep, which become the first.
            prompt_of: the prompt of each completion.
            lengths: tokens of each completion in the cache; the steps change them.
            room: tokens of a completion that fit in, a multiple of `MULTIPLE`.
        """
        before, self.lengths, self.room = len(self.lengths), lengths, room
        begun = prompt_of[len(rows) :]  # their states are those of their prompts, which come last
        of_states = torch.tensor([*rows, *(before + prompt - min(begun) for prompt in begun)], device=lengths.device)
        for layer in self.layers:
            if isinstance(layer, StaticLayer):
                layer.place(rows, lengths, room)
            if isinstance(layer, LinearAttentionLayer):
                LinearAttentionLayer.reorder_cache(layer, of_states)
        self._place(torch.tensor(prompt_of, device=lengths.device), len(self.seen))
        self.of_prompts = bias(self.seen, next(of.dtype for of in self.layers if isinstance(of, StaticLayer)))

    def states(self) -> list[torch.Tensor]:
        """Return the states of all layers, which a step changes in place."""
        of_layers = [getattr(layer, kind) for layer in self.layers for kind in STATES if hasattr(layer, kind)]
        return [state for of in of_layers for state in of.values() if state is not None]

    def mask(self, unused: torch.Tensor | None, window: int | None) -> PromptMask:
        """Return the mask of a step, which sees the token that it writes, too."""
        layers = [layer for layer in self.layers if isinstance(layer, StaticLayer) and layer.window == window]
        if not layers:  # some models make masks that none of their layers needs
            return PromptMask(self)
        layer = layers[0]
        lengths, (room, read) = self.lengths[:, None], (layer.keys.size(2), layer.prompt_keys.size(2))
        ages = (lengths - torch.arange(room, device=lengths.device)) % room
        if window is None:
            return PromptMask(self, self.of_prompts, bias(ages <= lengths, layer.keys.dtype))
        before = torch.arange(read, 0, -1, device=lengths.device)  # a completion's first token, from tokens of a prompt
        of_prompts = (lengths[self.at_places] + before < window).unflatten(0, (-1, self.width))
        of_prompts &= self.seen[:, None, -read:]
        of_completions = (ages <= lengths) & (ages < window)
        return PromptMask(self, *(bias(seen, layer.keys.dtype) for seen in (of_prompts, of_completions)))
