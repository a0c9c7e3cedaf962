"""Attention of a prompt and its completions by PyTorch's kernel for CPUs, without copies of the prompt's keys.

All completions of a prompt attend to it in one call without a mask, and each to itself in a causal one. The two are
merged by their log-sum-exps. A kernel's backward pass needs nothing of the forward pass but the output and the
log-sum-exp: given the merged ones, it returns its part of the gradient, as in ring attention (2310.01889).
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from grpo.trainer.sharing.layout import Group

forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Call(NamedTuple):
    """A call of the kernel: queries and keys are each `number` x `length` consecutive tokens."""

    query: tuple[int, int, int]
    """First token, number, length."""
    key: tuple[int, int, int]
    causal: bool
    merges: bool = False
    """Whether it adds to what an earlier call has computed for the same queries."""


def calls_of(groups: Sequence[Group]) -> Iterator[Call]:
    """Yield the calls that compute all groups; consecutive completions of equal length are one call."""
    for group in groups:
        begin = group.start + group.prompt
        if len(group.completions) == 1 or not group.prompt:
            whole = (group.start, 1, group.prompt + group.completions[0])
            if group.prompt:
                yield Call(whole, whole, causal=True)
                continue
        else:
            prompt = (group.start, 1, group.prompt)
            yield Call(prompt, prompt, causal=True)
            yield Call((begin, 1, group.end - begin), prompt, causal=False)
        for length, equal in groupby(group.completions):
            own = (begin, len(list(equal)), length)
            yield Call(own, own, causal=True, merges=group.prompt > 0)
            begin += own[1] * length


def part(tensor: torch.Tensor, place: tuple[int, int, int]) -> torch.Tensor:
    """Return some tokens of (1, heads, T, …) as (number, heads, length, …), without a copy."""
    start, number, length = place
    return tensor[0, :, start : start + number * length].unflatten(1, (number, length)).transpose(0, 1)


class MergedAttention(torch.autograd.Function):
    """Attention of groups, from queries (1, heads, T, size), keys and values to (1, heads, T, size)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        groups: Sequence[Group],
        scale: float | None,
    ) -> torch.Tensor:
        """Compute all calls, and merge."""
        _, heads, length, size = query.shape
        output = query.new_empty(1, length, heads, size).transpose(1, 2)
        logsumexp = query.new_empty(1, length, heads, dtype=torch.float32).transpose(1, 2)
        for call in calls_of(groups):
            tensors = part(query, call.query), part(key, call.key), part(value, call.key)
            found, sums = forward_kernel(*tensors, 0.0, call.causal, scale=scale)
            into, total = part(output, call.query), part(logsumexp, call.query)
            if call.merges:
                merged = torch.logaddexp(total, sums)
                into.mul_((total - merged).exp_()[..., None])
                into.add_(found.mul_((sums - merged).exp_()[..., None]))
                total.copy_(merged)
            else:
                into.copy_(found)
                total.copy_(sums)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.groups, ctx.scale = groups, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute the gradient of each call from the merged output and log-sum-exp."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for call in calls_of(ctx.groups):
            tensors = part(query, call.query), part(key, call.key), part(value, call.key)
            given = part(gradients[0], call.query)
            merged = part(output, call.query), part(logsumexp, call.query)
            found = backward_kernel(given, *tensors, *merged, 0.0, call.causal, scale=ctx.scale)
            for total, gradient, place in zip(sums, found, (call.query, call.key, call.key), strict=True):
                part(total, place).add_(gradient)
        return *sums, None, None


def can_merge(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel takes these queries and values."""
    return query.device.type == "cpu" and query.size(-1) == value.size(-1)
