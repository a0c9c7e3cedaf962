"""A cache that has each prompt's keys and values once for all its completions, and the attention to it, on CPUs.

Completions attend to their prompt together, in one call, and each to its own tokens in another; the outputs are merged
by their log-sum-exps. So for each token a prompt's keys are read once and not once per completion, without copies.
On GPUs the prompts' keys are repeated: the kernel that takes padding and returns these sums is a CPU's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from grpo.generation.transformers.growing_cache import GrowingCache, GrowingLayer, keeps_all_keys, widened
from grpo.utils.attention import as_computed, attention_by, implementations, policy_of

PREFIX = "shared_keys|"


class PromptLayer(GrowingLayer):
    """Keys and values of prompts, (prompts, heads, tokens, size), and of the tokens of completions after them."""

    def __init__(self, read: GrowingLayer) -> None:
        super().__init__()
        self.prompt_keys, self.prompt_values = as_computed(read.keys), as_computed(read.values)
        DynamicLayer.lazy_initialization(self, self.prompt_keys, self.prompt_values)
        self.keys, self.values = self.prompt_keys[:, :, :0], self.prompt_values[:, :, :0]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens of completions; return the keys and values of their tokens alone."""
        return super().update(key_states.to(self.keys.dtype), value_states.to(self.values.dtype), *args, **kwargs)

    def of_row(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a completion's tokens, (heads, tokens, size)."""
        return self.keys[row], self.values[row]

    def get_seq_length(self) -> int:
        """Return the tokens of a prompt and a completion."""
        return self.prompt_keys.size(2) + self.keys.size(2)


class PromptCache(GrowingCache):
    """The cache of completions; those of a prompt are neighbours.

    Args:
        read: the cache of the prompts, each of which becomes a completion without tokens.
    """

    layers: list[PromptLayer]

    def __init__(self, read: DynamicCache) -> None:
        super().__init__(None)
        self.layers = [PromptLayer(layer) for layer in read.layers]
        prompts = len(self.layers[0].prompt_keys)
        self._place(torch.arange(prompts), prompts)

    def _place(self, prompt_of: torch.Tensor, prompts: int) -> None:
        self.prompt_of = prompt_of
        """The prompt of each completion."""
        counts = prompt_of.bincount(minlength=prompts)
        self.starts = counts.cumsum(0) - counts
        """The first completion of each prompt."""
        self.width = int(counts.max())
        """Completions of the prompt that has most."""
        numbers = torch.arange(len(prompt_of), device=prompt_of.device)
        self.places = prompt_of * self.width + numbers - self.starts[prompt_of]
        """Where each completion is among `width` places of each prompt."""
        self.at_places = numbers.new_zeros(len(counts) * self.width).index_copy_(0, self.places, numbers)
        """The completion of each place; any, where there is none."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.layers[0].prompt_keys.size(2)

    def mask(self, seen: torch.Tensor | None, window: int | None) -> "PromptMask":
        """Return the mask of a pass, by which tokens are no padding, (completions, tokens); None if none is."""
        if seen is None:
            return PromptMask(self)
        of_prompts = seen[self.starts.clamp(max=len(seen) - 1), : self.prompt_tokens]  # any, without completions left
        parts = (of_prompts, seen[:, self.prompt_tokens :])
        return PromptMask(self, *(None if part.all() else bias(part, self.layers[0].keys.dtype) for part in parts))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these completions, which may repeat."""
        super().batch_select_indices(indices)
        self._place(self.prompt_of[indices], len(self.starts))

    def row(self, row: int, tokens: int) -> GrowingCache:
        """Return a copy of a prompt and a completion, whose last columns are so many tokens."""
        whole, prompt = GrowingCache(None), self.prompt_of[row]
        for number, layer in enumerate(self.layers):
            of_row = layer.of_row(row)
            keys = torch.cat((layer.prompt_keys[prompt], of_row[0]), 1)
            values = torch.cat((layer.prompt_values[prompt], of_row[1]), 1)
            whole.layers.append(GrowingLayer())
            whole.update(keys[None], values[None], number)
        return whole.row(0, tokens)

    def join(self, before: "PromptCache") -> None:
        """Put completions and prompts of another cache before those of this one, but prompts without completions."""
        super().join(before)
        left, renumbered = before.prompt_of.unique(return_inverse=True)
        for earlier, layer in zip(before.layers, self.layers, strict=True):
            layer.prompt_keys = widened([earlier.prompt_keys[left], layer.prompt_keys], 2)
            layer.prompt_values = widened([earlier.prompt_values[left], layer.prompt_values], 2)
            del earlier.prompt_keys, earlier.prompt_values
        self._place(torch.cat((renumbered, self.prompt_of + len(left))), len(left) + len(self.starts))


_cache: ContextVar[PromptCache] = ContextVar("cache")


@dataclass
class PromptMask:
    """Stands where a policy has its attention mask, in a pass that computes a token of each completion."""

    cache: PromptCache
    """The keys and values of the earlier tokens."""
    prompts: torch.Tensor | None = None
    """Added to the scores of the prompts' keys, (prompts, 1, 1 or places, keys); None if all are seen."""
    completions: torch.Tensor | None = None
    """The same of the completions' keys."""


def bias(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the summands of keys' scores, (rows, 1, places, keys), by whether they are seen.

    Args:
        seen: (rows, keys) or (rows, places, keys).
        dtype: of the keys.
    """
    unseen = torch.finfo(dtype).min / 2  # not -inf: without a key that is seen, the output would be nan
    added = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, unseen)
    return added.view(len(seen), 1, -1, seen.size(-1))


@contextmanager
def shared_keys(model: Any, cache: DynamicCache | None) -> Iterator[None]:
    """While inside, a policy computes the next tokens of completions; nothing changes for other caches."""
    if not isinstance(cache, PromptCache):
        yield
        return
    token = _cache.set(cache)
    try:
        with attention_by(model, PREFIX, attend, make_mask):
            yield
    finally:
        _cache.reset(token)


def make_mask(
    name: str, *args: Any, attention_mask: torch.Tensor | None = None, local_size: int | None = None, **options: Any
) -> PromptMask:
    """Return the mask of the completions in the cache; `local_size` is the layer's window."""
    return _cache.get().mask(attention_mask, local_size)


def attend(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PromptMask,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to prompts and to completions, and merge.

    Args:
        name: of the implementation that the policy had before.
        module: the layer.
        query: (completions, heads, 1, size).
        key: of the completions alone, (completions, key-value heads, tokens, size).
        value: like the keys.
        attention_mask: stands in the place of the policy's.
        scaling: of the scores; 1 / sqrt(size) if it is None.
        s_aux: scores of sinks, (heads): a key more of each head, whose value is zero.
        softcap: limit of the scores, which the kernel does not know.
        options: further ones of the implementation.

    Returns:
        Output, (completions, 1, heads, size), and no weights.
    """
    if softcap is not None:
        raise ValueError("its attention limits the scores")
    cache = attention_mask.cache
    layer = cache.layers[module.layer_idx]
    rows, heads, _, size = query.shape
    pairs = key.size(1)
    query = query.to(key.dtype).view(rows, pairs, heads // pairs, size)  # the heads of equal keys, like tokens
    completion_output, completion_sum = kernel(query, key, value, attention_mask.completions, scaling)

    of_prompts = attention_mask.prompts
    if of_prompts is not None and of_prompts.size(2) > 1:
        of_prompts = of_prompts.repeat_interleave(heads // pairs, 2)
    together = query.index_select(0, cache.at_places).unflatten(0, (-1, cache.width)).transpose(1, 2).flatten(2, 3)
    prompt_output, prompt_sum = (
        values.unflatten(2, (cache.width, -1)).transpose(1, 2).flatten(0, 1).index_select(0, cache.places)
        for values in kernel(together, layer.prompt_keys, layer.prompt_values, of_prompts, scaling)
    )
    share = (prompt_sum - completion_sum).sigmoid().to(completion_output.dtype)[..., None]
    output = completion_output.lerp(prompt_output, share)
    if s_aux is not None:
        beside_sinks = torch.logaddexp(prompt_sum, completion_sum) - s_aux.view(pairs, -1)
        output = output * beside_sinks.sigmoid().to(output.dtype)[..., None]
    return output.reshape(rows, 1, heads, -1), None


def kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, added: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output, (rows, heads, queries, size), and log-sum-exp, (rows, heads, queries)."""
    if added is not None:  # the kernel of a GPU takes no mask of a single head for all
        added = added.to(query.dtype).expand(-1, query.size(1), query.size(2), -1)
    if query.is_cuda:  # this kernel of a GPU takes masks, and returns sums of 32 queries, or of 64, and so on
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        output, sums, *_ = attention(query, key, value, added, compute_log_sumexp=True, scale=scale)
        return output, sums[:, :, : query.size(2)]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attention(query, key, value, attn_mask=added, scale=scale)


def why_repeated(model: Any) -> str | None:
    """Return why a policy has to repeat the keys of prompts for their completions, or None; see also the trial."""
    policy = policy_of(model)
    if policy.device.type != "cpu":
        return "it is not on a CPU"
    if not keeps_all_keys(policy):
        return "some of its layers have a window of tokens or a state"
    if (names := set(implementations(model))) != {"sdpa"}:
        return f"its attention is {', '.join(sorted(names))}"
    return None
