"""The attention of shared prompts: a prompt attends to itself, a completion to its prompt and to itself.

While `shared_attention` is on, a policy's attention goes through transformers' `AttentionInterface` to a function that
hands each of these parts to the implementation that the policy had before (sdpa, eager, FlashAttention, flex). Time and
memory are those of the pairs of tokens that see each other. The layout of the sequence travels in the place of the
attention mask, from where the policy would have made the mask: so layers that are computed again in the backward pass
know it, too.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo.trainer.shared_prompts.layout import Group
from grpo.trainer.shared_prompts.merged import can_merge, layout_on, merged_attention
from grpo.trainer.shared_prompts.rows import attend_rows, largest_mask, rows_of
from grpo.trainer.shared_prompts.states import shared_states
from grpo.utils.attention import as_computed, attention_by
from grpo.utils.patching import replaced

PREFIX = "shared_prompts|"
SHORT = 256
"""Tokens of groups, each a prompt with its completions, that are attended in two calls: many calls would cost more."""
LARGEST_MASK = 2**28
"""Pairs of tokens in the mask of such calls on a GPU."""
_groups: ContextVar[tuple[Sequence[Group], list[Any] | None] | None] = ContextVar("groups", default=None)


class GroupMask:
    """Stands where a policy has its attention mask, and makes those of single prompts and completions.

    Compiled layers see its flags and its tensors alone, so that one of other groups changes nothing for them.

    Args:
        name: of the implementation.
        groups: of the sequence.
        make: a function of transformers' `AttentionMaskInterface`.
        options: what the policy gives it.
        attended: gets the layers that attend by it, if it is a list.
    """

    def __init__(
        self,
        name: str,
        groups: Sequence[Group],
        make: Callable[..., Any],
        options: dict[str, Any],
        attended: list[Any] | None,
    ) -> None:
        self.groups, self.options, self.attended, self.tokens = groups, options, attended, groups[-1].end
        self._make, self._masks = make, dict[tuple[int, int, int], Any]()
        self.device: torch.device = options["device"]
        on_gpu = self.device.type == "cuda"
        short = not on_gpu and all(group.end - group.start <= SHORT for group in groups)
        longest, window = max(group.prompt + max(group.completions) for group in groups), options.get("local_size")
        is_causal = options["allow_is_causal_skip"] and (window is None or longest <= window)
        equal = len({getattr(options.get("config"), of, None) for of in ("qk_head_dim", "v_head_dim")}) == 1
        merges = name == "sdpa" and is_causal and equal and not short
        self.layout = layout_on(self.device, groups) if merges else None
        self.as_rows = name in ("sdpa", "eager") and not options.get("use_vmap")
        self.as_rows &= short or (on_gpu and largest_mask(groups) <= LARGEST_MASK)
        self.known_rows: Any = self.rows() if self.as_rows and not merges else None

    def is_causal(self, tokens: int) -> bool:
        """Return whether each of so many consecutive tokens sees all earlier ones."""
        window = self.options.get("local_size")
        return self.options["allow_is_causal_skip"] and (window is None or tokens <= window)

    def of(self, group: Group, earlier: int, tokens: int) -> Any:
        """Return the mask of a part of a group: so many tokens after `earlier` ones of the prompt."""
        plain = self.options["allow_is_causal_skip"]
        offset = 0 if plain else group.start  # other masks look up what stands where in the sequence
        if (key := (offset, earlier, tokens)) not in self._masks:
            function = self.options["mask_function"]
            moved = function if plain else lambda b, h, q, k: function(b, h, q + offset, k + offset)
            lengths = {"q_length": tokens, "kv_length": earlier + tokens, "q_offset": earlier, "kv_offset": 0}
            overrides = {"batch_size": 1, "mask_function": moved, "attention_mask": None}
            self._masks[key] = self._make(**{**self.options, **lengths, **overrides})
        return self._masks[key]

    @torch.compiler.disable  # which would be compiled anew for other groups
    def rows(self) -> Any:
        """Return the groups as `attend_rows` takes them."""
        in_place = not self.options["allow_is_causal_skip"]
        self.known_rows = rows_of(self.groups, self.options["mask_function"], in_place, self.device)
        return self.known_rows

    def for_rows(self, name: str, seen: torch.Tensor) -> torch.Tensor:
        """Return which tokens see which as the mask that an implementation takes."""
        if name == "sdpa":
            return seen
        kind = self.options["dtype"]
        return torch.zeros((), dtype=kind, device=seen.device).where(seen, torch.finfo(kind).min)


@contextmanager
def shared_attention(model: Any) -> Iterator[None]:
    """While inside, the language model of a policy can share prompts; others are computed as before.

    The backward pass belongs inside, too, where layers are computed again.
    """
    with attention_by(model, PREFIX, attend, make_mask), shared_states(model, lambda: _groups.get()):
        yield


@contextmanager
def grouped(groups: Sequence[Group], attended: list[Any] | None = None) -> Iterator[None]:
    """While inside, the policy's sequence consists of these groups; `attended` gets the layers that attend by them."""
    token = _groups.set((groups, attended))
    try:
        yield
    finally:
        _groups.reset(token)


def make_mask(name: str, *args: Any, **options: Any) -> Any:
    """Return the mask of a policy whose attention is called so: of the groups, if there are any."""
    make = ALL_MASK_ATTENTION_FUNCTIONS[name]
    within = _groups.get()
    return make(*args, **options) if within is None or args else GroupMask(name, within[0], make, options, within[1])


def attend(
    name: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    position_ids: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend as the implementation of a name does, within the groups if the mask is one of groups.

    Args:
        name: of the implementation.
        module: the layer.
        query: (1, heads, T, size).
        key: (1, key-value heads, T, size).
        value: like the keys.
        attention_mask: a `GroupMask`, or the implementation's own mask.
        position_ids: not for a part of the sequence.
        options: further ones of the implementation.

    Returns:
        Output, (1, T, heads, size), and no weights.

    Raises:
        ValueError: the layer attends to other tokens than those of the groups.
    """
    if not isinstance(attention_mask, GroupMask):
        options |= {} if position_ids is None else {"position_ids": position_ids}
        with replaced(module.config, "_attn_implementation", name):
            return implementation(name, module)(module, query, key, value, attention_mask, **options)
    if not query.size(2) == key.size(2) == attention_mask.tokens:
        raise ValueError(f"{query.size(2)} queries and {key.size(2)} keys of {attention_mask.tokens} tokens")
    if not torch.compiler.is_compiling() and attention_mask.attended is not None:
        attention_mask.attended.append(module)
    whole = not options.get("dropout") and options.get("position_bias") is None
    if attention_mask.layout is not None and whole:
        tensors = tuple(as_computed(tensor) for tensor in (query, key, value))
        if can_merge(*tensors):
            return merged_attention(tensors, attention_mask.layout, options.get("scaling")), None
    function = implementation(name, module)
    if attention_mask.as_rows and options.get("position_bias") is None:
        rows, order = attention_mask.known_rows or attention_mask.rows()
        way = partial(function, module, **options)
        with replaced(module.config, "_attn_implementation", name):
            as_mask = partial(attention_mask.for_rows, name)
            return attend_rows(way, (query, key, value), rows, order, as_mask), None
    with replaced(module.config, "_attn_implementation", name):
        return attend_parts(partial(function, module, **options), (query, key, value), attention_mask, name), None


def implementation(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the attention function of a name, for a layer."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


@torch.compiler.disable  # which would be compiled anew for other groups
def attend_parts(way: Callable[..., Any], tensors: Sequence[torch.Tensor], mask: GroupMask, name: str) -> torch.Tensor:
    """Return the output of all tokens, (1, T, heads, size), of a call for each prompt and each completion."""
    return torch.cat([way(*part, of_part)[0] for part, of_part in _parts(tensors, mask, name)], 1)


def _parts(
    tensors: Sequence[torch.Tensor], mask: GroupMask, name: str
) -> Iterator[tuple[tuple[torch.Tensor, ...], Any]]:
    """Yield queries, keys, values and mask of each prompt and each completion."""
    query, key, value = tensors
    for group in mask.groups:
        begin = group.start + group.prompt
        prompt = slice(group.start, begin)
        if group.prompt:
            of_part = tuple(tensor[:, :, prompt] for tensor in (query, key, value))
            yield of_part, mask.of(group, 0, group.prompt)
        for length in group.completions:
            of_part = tuple(tensor[:, :, begin : begin + length] for tensor in (query, key, value))
            before = [
                torch.cat((tensor[:, :, prompt], of), 2) for tensor, of in zip((key, value), of_part[1:], strict=True)
            ]
            if name == "sdpa" and query.is_cuda and group.prompt and mask.is_causal(group.prompt + length):
                yield (of_part[0], *before), causal_lower_right(length, group.prompt + length)  # no mask in memory
            else:
                yield (of_part[0], *before), mask.of(group, group.prompt, length)
            begin += length
