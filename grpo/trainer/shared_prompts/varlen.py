"""Attention of prompts and their completions on a GPU, in two calls of PyTorch's flash kernel for any number of groups.

The kernel takes sequences of different lengths one behind another. In the first call each prompt and each completion
attends to itself, in the second the completions of each group attend to their prompt. The two are merged as in
`merged.py`. A call for each completion would compute the same: its launches would take most of
the time of an update.

Shapes: T tokens of the sequence, C of them of completions that share a prompt, P of these prompts.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from grpo.trainer.shared_prompts.layout import Group
from grpo.utils.device import sent

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


def segments_of(groups: Sequence[Group], device: torch.device) -> list[torch.Tensor]:
    """Return the segments of the groups of a sequence, see `segments_in`; the device gets them by one copy."""
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
    lengths = [part_lengths, *([len(part) for part in of] or [0] for of in (completions, prompts))]
    bounds = [torch.tensor([0, *accumulate(of)]) for of in lengths]
    indices = [torch.cat([places[:0], *of]) for of in (completions, prompts)]
    # at most 1, and the kernel would lay out its log-sum-exp in another way
    longest = torch.tensor([max(2, *of) for of in lengths])
    on_device = sent([*bounds, *indices], device)
    # no views, which layers would be compiled for
    return [*(of.int() for of in on_device[:3]), *(of.clone() for of in on_device[3:]), longest]


def segments_in(layout: Sequence[torch.Tensor]) -> Segments:
    """Return the segments in a list of tensors, which a compiled layer takes; the last one is in host memory."""
    *bounds, completions, prompts, longest = layout
    of_all, of_completions, of_prompts = (Parts(*part) for part in zip(bounds, longest.tolist(), strict=True))
    return Segments(of_all, completions, prompts, of_completions, of_prompts)


def forward_kernel(
    tensors: Sequence[torch.Tensor], rows: tuple[Parts, Parts], scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Return output, (queries, heads, size), and log-sum-exp, (heads, queries).

    Args:
        tensors: queries, (queries, heads, size), keys, (keys, key-value heads, size), and values, like the keys.
        rows: parts of the queries and parts of the keys; equal ones are causal.
        scale: of the products of queries and keys.
    """
    of_queries, of_keys = rows
    bounds, longest = (of_queries.bounds, of_keys.bounds), (of_queries.longest, of_keys.longest)
    causal = of_queries is of_keys
    return aten._flash_attention_forward(*tensors, *bounds, *longest, 0.0, causal, False, scale=scale)[:2]


def backward_kernel(
    gradient: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    rows: tuple[Parts, Parts],
    scale: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of queries, keys and values, from that of the output.

    Args:
        gradient: of the output.
        tensors: queries, keys, values, output and log-sum-exp.
        rows: as in `forward_kernel`.
        scale: of the products of queries and keys.
    """
    of_queries, of_keys = rows
    bounds, longest = (of_queries.bounds, of_keys.bounds), (of_queries.longest, of_keys.longest)
    causal = of_queries is of_keys
    seed = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # of dropout, which there is none of
    return aten._flash_attention_backward(
        gradient, *tensors, *bounds, *longest, 0.0, causal, seed, seed.new_empty(0), scale=scale
    )


def forward(
    tensors: Sequence[torch.Tensor], layout: Sequence[torch.Tensor], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output, (T, heads, size), and log-sum-exp, (heads, T), of both calls, merged; tensors are (T, …, size)."""
    segments = segments_in(layout)
    output, sums = forward_kernel(tensors, (segments.of_all, segments.of_all), scale)
    if len(segments.completions):
        prompt_output, prompt_sums = forward_kernel(across(tensors, segments), rows_across(segments), scale)
        completion_sums, completion_output = sums[:, segments.completions], output[segments.completions]
        merged = torch.logaddexp(completion_sums, prompt_sums)
        completion_output.mul_((completion_sums - merged).exp_().t()[..., None])
        completion_output.add_(prompt_output.mul_((prompt_sums - merged).exp_().t()[..., None]))
        output.index_copy_(0, segments.completions, completion_output)
        sums.index_copy_(1, segments.completions, merged)
    return output, sums


def backward(
    gradient: torch.Tensor, tensors: Sequence[torch.Tensor], layout: Sequence[torch.Tensor], scale: float | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of queries, keys and values; tensors are these, output and log-sum-exp."""
    segments = segments_in(layout)
    *inputs, output, sums = tensors
    totals = backward_kernel(gradient, tensors, (segments.of_all, segments.of_all), scale)
    if len(places := segments.completions):
        of = (*across(inputs, segments), output[places], sums[:, places].contiguous())
        parts = backward_kernel(gradient[places], of, rows_across(segments), scale)
        for total, part, where in zip(totals, parts, (places, segments.prompts, segments.prompts), strict=True):
            total.index_copy_(0, where, part.add_(total[where]))
    return totals


def across(tensors: Sequence[torch.Tensor], segments: Segments) -> tuple[torch.Tensor, ...]:
    """Return the queries of completions, and the keys and values of their prompts."""
    query, key, value = tensors
    return query[segments.completions], key[segments.prompts], value[segments.prompts]


def rows_across(segments: Segments) -> tuple[Parts, Parts]:
    """Return the parts of the second call."""
    return segments.of_completions, segments.of_prompts
