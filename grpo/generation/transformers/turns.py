"""The caches of completions that have ended, from which the next turn of a conversation with tools continues."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from grpo.generation.transformers.growing_cache import GrowingCache, join

Read = Callable[[GrowingCache, torch.Tensor, torch.Tensor], Any]
"""Has a cache of the first tokens of rows read all of their tokens, padded on the left, beside a mask."""


class Turns:
    """Caches by their tokens; valid while the weights stay the same, for one generation.

    Args:
        most: number of caches to keep; None keeps those of all completions.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.caches: dict[tuple[int, ...], GrowingCache] = {}

    def drop(self) -> None:
        """Drop all caches, and keep no more: completions that are under way need the memory."""
        self.caches.clear()
        self.most = 0

    def keep(self, tokens: list[int], cache: GrowingCache, row: int, in_groups: bool) -> None:
        """Keep a row of a batch's cache, whose last columns are these tokens.

        Args:
            tokens: tokens of the row.
            cache: the batch's cache.
            row: the row's number.
            in_groups: whether `take` may read what comes after them in several groups, as it does if a window has moved
                past some of them, or if a layer has a state: such a cache cannot be cut to an earlier token.
        """
        if self.most is None or len(self.caches) < self.most:
            kept = cache.row(row, len(tokens))
            if in_groups or can_be_cut(kept):
                self.caches[tuple(tokens)] = kept

    def take(self, ids: torch.Tensor, mask: torch.Tensor, read: Read) -> GrowingCache | None:
        """Return a cache of the beginnings of the prompts, without their last tokens; None if one is unknown.

        The returned entries are removed.

        Args:
            ids: prompts, padded on the left, (prompts, tokens).
            mask: mask of the tokens.
            read: reads tokens of prompts whose caches cannot be cut to lack equally many.
        """
        prompts = [tuple(row[keep.bool()].tolist()) for row, keep in zip(ids, mask, strict=True)]
        known = [max((t for t in self.caches if prompt[:-1][: len(t)] == t), key=len, default=()) for prompt in prompts]
        if not all(known) or max(map(len, prompts)) < ids.size(1):
            return None
        caches = [
            self.caches[tokens].row(0, len(tokens)) if tokens in known[:place] else self.caches[tokens]
            for place, tokens in enumerate(known)
        ]
        self.caches = {tokens: cache for tokens, cache in self.caches.items() if tokens not in known}
        new = [len(prompt) - len(tokens) for prompt, tokens in zip(prompts, known, strict=True)]
        if all(map(can_be_cut, caches)):
            for cache, prompt in zip(caches, prompts, strict=True):
                cut(cache, max(0, len(prompt) - max(new)))
            new = [max(new)] * len(new)
        by_new = [[place for place, count in enumerate(new) if count == of] for of in sorted(set(new))]
        groups = [join([caches[place] for place in places]) for places in by_new]
        if len(groups) == 1:
            return groups[0]
        for cache, places in zip(groups, by_new, strict=True):
            longest = max(len(prompts[place]) for place in places)
            if new[places[0]] > 1:
                read(cache, ids[places, -longest:-1], mask[places, -longest:-1])
        order = torch.tensor([place for places in by_new for place in places], device=ids.device)
        cache = join(groups)
        cache.batch_select_indices(order.argsort())
        return cache


def can_be_cut(cache: GrowingCache) -> bool:
    """Return whether all layers have the keys of all tokens, and no state."""
    return all(
        isinstance(layer, DynamicLayer)
        and not isinstance(layer, LinearAttentionLayer)
        and layer.keys.size(2) == layer.get_seq_length()
        for layer in cache.layers
    )


def cut(cache: GrowingCache, tokens: int) -> None:
    """Keep the first tokens of a cache that can be cut."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]
        if layer.is_sliding:
            layer.cumulative_length = tokens
