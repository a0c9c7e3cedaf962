"""Attention of prompts and their completions on a GPU, in two calls of PyTorch's flash kernel for any number of groups.

The kernel takes sequences of different lengths one behind another. In the first call each prompt and each completion
attends to itself, in the second the completions of each group attend to their prompt. The two are merged as in
`merged.py`. A call for each completion would compute the same: its launches would take most of
the time of an update.

Shapes: T tokens of the sequence, C of them of completions that share a prompt, P of these prompts.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from grpo.trainer.shared_prompts.layout import Group

aten = torch.ops.aten


class Parts(NamedTuple):
    """Consecutive parts of a number of tokens."""

    bounds: torch.Tensor
    """Where each begins, and the end of the last, (parts + 1), int32."""
    longest: int
    """Tokens of the longest."""


class Segments(NamedTuple):
    """The parts of a sequence that the calls of the kernel need."""

    of_all: Parts
    """Parts of T tokens: each prompt and each completion. A prompt with a single completion is one part with it."""
    completions: torch.Tensor
    """Where the tokens of completions that share a prompt are, among T, (C)."""
    prompts: torch.Tensor
    """Where the tokens of shared prompts are, among T, (P)."""
    of_completions: Parts
    """Parts of C tokens: all completions of a prompt."""
    of_prompts: Parts
    """Parts of P tokens: each shared prompt."""


def segments_of(groups: Sequence[Group], device: torch.device) -> Segments:
    """Return the segments of the groups of a sequence."""
    places = torch.arange(groups[-1].end)
    part_lengths: list[int] = []
    prompts, completions = [], []
    for group in groups:
        begin = group.start + group.prompt
        if group.prompt and len(group.completions) > 1:
            part_lengths += [group.prompt, *group.completions]
            prompts.append(places[group.start : begin])
            completions.append(places[begin : group.end])
        else:
            part_lengths += [group.prompt + group.completions[0], *group.completions[1:]]

    def parts(lengths: Sequence[int]) -> Parts:
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        # at most 1, and the kernel would lay out its log-sum-exp in another way
        return Parts(bounds.to(device), max(2, *lengths))

    indices, lengths = [], []
    for of in (completions, prompts):
        indices.append(torch.cat([places[:0], *of]).to(device))
        lengths.append(parts([len(part) for part in of] or [0]))
    return Segments(parts(part_lengths), *indices, *lengths)


def forward_kernel(
    tensors: Sequence[torch.Tensor], rows: tuple[Parts, Parts], scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Return output, (queries, heads, size), log-sum-exp, (heads, queries), and what the backward pass needs besides.

    Args:
        tensors: queries, (queries, heads, size), keys, (keys, key-value heads, size), and values, like the keys.
        rows: parts of the queries and parts of the keys; equal ones are causal.
        scale: of the products of queries and keys.
    """
    of_queries, of_keys = rows
    bounds, longest = (of_queries.bounds, of_keys.bounds), (of_queries.longest, of_keys.longest)
    causal = of_queries is of_keys
    return aten._flash_attention_forward(*tensors, *bounds, *longest, 0.0, causal, False, scale=scale)[:4]


def backward_kernel(
    gradient: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    rows: tuple[Parts, Parts],
    besides: Sequence[torch.Tensor],
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of queries, keys and values, from that of the output.

    Args:
        gradient: of the output.
        tensors: queries, keys, values, output and log-sum-exp.
        rows: as in `forward_kernel`.
        besides: the rest of `forward_kernel`'s result.
        scale: of the products of queries and keys.
    """
    of_queries, of_keys = rows
    bounds, longest = (of_queries.bounds, of_keys.bounds), (of_queries.longest, of_keys.longest)
    causal = of_queries is of_keys
    return aten._flash_attention_backward(gradient, *tensors, *bounds, *longest, 0.0, causal, *besides, scale=scale)


class VarlenAttention(torch.autograd.Function):
    """Attention of segments, from queries (1, heads, T, size), keys and values to (1, heads, T, size)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: Segments,
        scale: float | None,
    ) -> torch.Tensor:
        """Compute both calls, and merge."""
        tensors = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
        output, sums, *besides = forward_kernel(tensors, (segments.of_all, segments.of_all), scale)
        more: list[torch.Tensor] = []
        if len(segments.completions):
            prompt_output, prompt_sums, *more = forward_kernel(across(tensors, segments), rows_across(segments), scale)
            completion_sums, completion_output = sums[:, segments.completions], output[segments.completions]
            merged = torch.logaddexp(completion_sums, prompt_sums)
            completion_output.mul_((completion_sums - merged).exp_().t()[..., None])
            completion_output.add_(prompt_output.mul_((prompt_sums - merged).exp_().t()[..., None]))
            output.index_copy_(0, segments.completions, completion_output)
            sums.index_copy_(1, segments.completions, merged)
        output = output.transpose(0, 1)[None]
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.segments, ctx.scale, ctx.besides = segments, scale, (besides, more)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute the gradient of each call from the merged output and log-sum-exp."""
        *saved, sums = ctx.saved_tensors
        *tensors, output, grad = (tensor[0].transpose(0, 1) for tensor in (*saved, gradients[0]))
        segments: Segments = ctx.segments
        besides, more = ctx.besides
        totals = backward_kernel(grad, (*tensors, output, sums), (segments.of_all, segments.of_all), besides, ctx.scale)
        if len(places := segments.completions):
            of = (*across(tensors, segments), output[places], sums[:, places].contiguous())
            parts = backward_kernel(grad[places], of, rows_across(segments), more, ctx.scale)
            for total, part, where in zip(totals, parts, (places, segments.prompts, segments.prompts), strict=True):
                total.index_copy_(0, where, part.add_(total[where]))
        return *(total.transpose(0, 1)[None] for total in totals), None, None


def across(tensors: Sequence[torch.Tensor], segments: Segments) -> tuple[torch.Tensor, ...]:
    """Return the queries of completions, and the keys and values of their prompts."""
    query, key, value = tensors
    return query[segments.completions], key[segments.prompts], value[segments.prompts]


def rows_across(segments: Segments) -> tuple[Parts, Parts]:
    """Return the parts of the second call."""
    return segments.of_completions, segments.of_prompts
