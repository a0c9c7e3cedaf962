"""The caches of completions that have ended, from which the next turn of a conversation with tools continues."""

from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicCache, DynamicLayer

from grpo.generation.transformers.growing_cache import GrowingCache
from grpo.generation.transformers.prompt_cache import sequence

Layers = list[tuple[torch.Tensor, ...]]
"""Keys and values of each layer for one sequence, (heads, tokens, size)."""


class Turns:
    """Caches by their tokens; valid while the weights stay the same, for one generation.

    Args:
        most: number of caches to keep; None keeps those of all completions.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.caches: dict[tuple[int, ...], Layers] = {}

    def drop(self) -> None:
        """Drop all caches, and keep no more: completions that are under way need the memory."""
        self.caches.clear()
        self.most = 0

    def keep(self, tokens: list[int], cache: Any, row: int) -> None:
        """Keep a row of a batch's cache, whose last columns are these tokens.

        Not if a window has moved past some, or if a layer has a state, which cannot be cut to an earlier token.
        """
        if self.most is not None and len(self.caches) >= self.most:
            return
        if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
            return
        layers = sequence(cache, row)
        if any(keys.size(1) < cache.get_seq_length() for keys, _ in layers):
            return
        last = slice(cache.get_seq_length() - len(tokens), None)
        self.caches[tuple(tokens)] = [(keys[:, last].clone(), values[:, last].clone()) for keys, values in layers]

    def take(self, ids: torch.Tensor, mask: torch.Tensor, config: Any) -> DynamicCache | None:
        """Return a cache of the beginnings of the prompts, without their last tokens; None if one is unknown.

        The returned entries are removed.

        Args:
            ids: prompts, padded on the left, (prompts, tokens).
            mask: mask of the tokens.
            config: the model's configuration.
        """
        prompts = [tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, mask, strict=True)]
        known = [max((t for t in self.caches if prompt[: len(t)] == t), key=len, default=()) for prompt in prompts]
        if not all(known):
            return None
        caches = [self.caches[tokens] for tokens in known]
        self.caches = {tokens: layers for tokens, layers in self.caches.items() if tokens not in known}
        new = max(len(prompt) - len(tokens) for prompt, tokens in zip(prompts, known, strict=True))
        lengths = [max(0, len(prompt) - new) for prompt in prompts]
        width = ids.size(1) - new

        def batch(layer: int, of: int) -> torch.Tensor:
            rows = zip(caches, lengths, strict=True)
            return torch.stack([pad(row[layer][of][:, :length], (0, 0, width - length, 0)) for row, length in rows])

        cache = GrowingCache(config)
        for layer in range(len(caches[0])):
            cache.update(batch(layer, 0), batch(layer, 1), layer)
            for row in caches:  # so that a layer exists twice, and not the cache
                row[layer] = ()
        return cache
