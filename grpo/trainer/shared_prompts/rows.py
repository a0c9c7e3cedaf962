"""Attention of prompts and completions in two calls, for layers with windows, sinks, soft caps or unequal head sizes.

The rows of the first call are the prompts, those of the second the completions, each with the keys of its prompt before
its own. Both are padded, and a mask says what each token sees.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from grpo.trainer.shared_prompts.layout import Group

Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From indices of batch, head, query and key, which broadcast, to whether the query sees the key."""


class Row(NamedTuple):
    """A prompt, or a completion with its prompt, by places among T."""

    first: int
    """Place of the first token of its group."""
    queries: Sequence[int]
    keys: Sequence[int]


class Rows(NamedTuple):
    """Padded rows of a call, of a sequence of T tokens."""

    queries: torch.Tensor
    """Where the query of each place is, among T, (R, Q); the last one of a row fills its padding."""
    keys: torch.Tensor
    """Where the key of each place is, among T, (R, K)."""
    seen: torch.Tensor
    """Which queries see which keys, (R, 1, Q, K)."""
    places: torch.Tensor
    """Where the queries without padding are, among R x Q."""


def largest_mask(groups: Sequence[Group]) -> int:
    """Return the number of pairs of tokens in the larger mask of both calls."""
    lengths = [(length, group.prompt + length) for group in groups for length in group.completions]
    completions = len(lengths) * max(length for length, _ in lengths) * max(length for _, length in lengths)
    return max(completions, len(groups) * max(group.prompt for group in groups) ** 2)


def rows_of(groups: Sequence[Group], sees: Sees, in_place: bool, device: torch.device) -> tuple[list[Rows], Any]:
    """Return the rows of both calls, and where each of the T tokens is among the queries of both without padding.

    Args:
        groups: of the sequence.
        sees: a mask function of transformers.
        in_place: whether it takes the places of tokens in the sequence; otherwise those in a sequence of their own.
        device: of the tokens.
    """
    prompts, completions = list[Row](), list[Row]()
    for group in groups:
        prompt, begin = range(group.start, group.start + group.prompt), group.start + group.prompt
        if group.prompt:
            prompts.append(Row(group.start, prompt, prompt))
        for end in accumulate(group.completions, initial=begin):
            if end > begin:
                completions.append(Row(group.start, range(begin, end), [*prompt, *range(begin, end)]))
            begin = end
    calls = [call for call in (prompts, completions) if call]
    order = torch.tensor([token for call in calls for row in call for token in row.queries]).argsort()
    return [padded_rows(call, sees, in_place, device) for call in calls], order.to(device)


def padded_rows(call: Sequence[Row], sees: Sees, in_place: bool, device: torch.device) -> Rows:
    """Return the padded rows of a call; further arguments as of `rows_of`."""
    parts = [[row.queries for row in call], [row.keys for row in call]]
    sizes = [torch.tensor([len(places) for places in part])[:, None] for part in parts]
    queries, keys = (
        torch.nn.utils.rnn.pad_sequence([torch.tensor([*places]) for places in part], batch_first=True)
        for part in parts
    )
    of_queries, of_keys = (torch.arange(tensor.size(1)).expand_as(tensor) for tensor in (queries, keys))
    real = of_queries < sizes[0]
    of_queries = of_queries.minimum(sizes[0] - 1)
    queries = queries.gather(1, of_queries)
    offset = torch.tensor([row.first if in_place else 0 for row in call])[:, None]
    earlier = sizes[1] - sizes[0]
    first = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    query_places, key_places = ((of + offset).to(device) for of in (of_queries + earlier, of_keys))
    seen = sees(first, first, query_places[:, None, :, None], key_places[:, None, None, :])
    seen = seen & (of_keys < sizes[1]).to(device)[:, None, None, :]
    return Rows(queries.to(device), keys.to(device), seen, real.flatten().nonzero()[:, 0].to(device))


def attend_rows(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    rows: Sequence[Rows],
    order: torch.Tensor,
    as_mask: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the output of all tokens, (1, T, heads, size).

    Args:
        function: an attention function of transformers, from queries, keys, values and mask to a tuple with the output.
        tensors: queries, (1, heads, T, size), keys, (1, key-value heads, T, size), and values, like the keys.
        rows: from `rows_of`.
        order: from `rows_of`.
        as_mask: makes of what is seen what the function takes.
    """
    outputs = []
    for call in rows:
        query, key, value = (
            tensor[0].index_select(1, places.flatten()).unflatten(1, places.shape).transpose(0, 1)
            for tensor, places in zip(tensors, (call.queries, call.keys, call.keys), strict=True)
        )
        output = function(query, key, value, as_mask(call.seen))[0]
        outputs.append(output.flatten(0, 1).index_select(0, call.places))
    return torch.cat(outputs).index_select(0, order)[None]
