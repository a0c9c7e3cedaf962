"""A cache whose memory stays in place while a GPU repeats a recorded step, with each prompt once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from grpo.generation.transformers.growing_cache import GrowingCache, widened
from grpo.generation.transformers.prompt_cache import PromptCache, PromptLayer, PromptMask, bias

MULTIPLE = 16
"""Lengths of masks are multiples of it, as the kernel reads 16 bytes at once."""


class StaticLayer(PromptLayer):
    """Keys and values of prompts, and of completions with room for more tokens, (rows, heads, room, size).

    Args:
        read: layer of the cache of the prompts.
        missing: tokens of padding to put before the prompts.
    """

    next_tokens: tuple[torch.Tensor, slice, torch.Tensor]
    """Where the next token of each row is written."""

    def __init__(self, read: Any, missing: int) -> None:
        super().__init__(read)
        self.prompt_keys = pad(self.prompt_keys, (0, 0, missing, 0))
        self.prompt_values = pad(self.prompt_values, (0, 0, missing, 0))
        self.keys, self.values = self.keys[:0], self.values[:0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a token of each row; return the keys and values of completions, with the room behind them."""
        self.keys[self.next_tokens] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[self.next_tokens] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys, self.values


class StaticCache(PromptCache):
    """The cache of completions in a batch whose rows change only when it is placed anew.

    Args:
        read: the cache of the prompts, without completions yet.
        seen: which tokens of the prompts are no padding, (prompts, tokens).
    """

    layers: list[StaticLayer]
    lengths: torch.Tensor
    """Tokens of each row in the cache, (rows)."""

    def __init__(self, read: GrowingCache, seen: torch.Tensor) -> None:
        super(PromptCache, self).__init__(None)
        missing = -seen.size(1) % MULTIPLE
        self.layers = [StaticLayer(layer, missing) for layer in read.layers]
        self.seen = pad(seen.bool(), (missing, 0))

    @property
    def room(self) -> int:
        """Tokens of a completion that fit in."""
        return self.layers[0].keys.size(2)

    def add(self, prompts: list[int], further: "StaticCache") -> None:
        """Keep some prompts, and put those of another cache behind them."""
        for layer, of_others in zip(self.layers, further.layers, strict=True):
            for name in ("prompt_keys", "prompt_values"):
                setattr(layer, name, widened([getattr(layer, name)[prompts], getattr(of_others, name)], 2))
        self.seen = widened([self.seen[prompts], further.seen], -1)

    def place(self, rows: list[int], prompt_of: Sequence[int], lengths: torch.Tensor, room: int) -> None:
        """Place completions in new memory.

        Args:
            rows: rows to keep, which become the first.
            prompt_of: the prompt of each completion.
            lengths: tokens of each completion in the cache; the steps change them.
            room: tokens of a completion that fit in, a multiple of `MULTIPLE`.
        """
        self.lengths, places = lengths, torch.arange(len(lengths), device=lengths.device)
        for layer in self.layers:
            for name in ("keys", "values"):
                before: torch.Tensor = getattr(layer, name)
                after = before.new_zeros(len(lengths), before.size(1), room, before.size(3))
                after[: len(rows), :, : before.size(2)] = before[rows]
                setattr(layer, name, after)
            layer.next_tokens = (places, slice(None), lengths)
        self._place(torch.tensor(prompt_of, device=lengths.device))
        self.of_prompts = bias(self.seen, self.layers[0].keys.dtype)

    def mask(self, unused: torch.Tensor | None) -> PromptMask:
        """Return the mask of a step, which sees the token that it writes, too."""
        seen = torch.arange(self.room, device=self.lengths.device) <= self.lengths[:, None]
        return PromptMask(self, self.of_prompts, bias(seen, self.layers[0].keys.dtype))
