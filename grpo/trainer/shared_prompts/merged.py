"""Attention of a prompt and its completions by PyTorch's flash kernels, without copies of the prompt's keys.

All completions of a prompt attend to it in one call without a mask, and each to itself in a causal one. The two are
merged by their log-sum-exps. A kernel's backward pass needs nothing of the forward pass but the output and the
log-sum-exp: given the merged ones, it returns its part of the gradient, as in ring attention (2310.01889).

On a CPU each prompt has calls of its own; on a GPU those of all prompts are two (`varlen.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch

from grpo.trainer.shared_prompts.layout import Group
from grpo.trainer.shared_prompts.varlen import Segments, VarlenAttention, segments_of
from grpo.utils.oom import tried

aten = torch.ops.aten


class Call(NamedTuple):
    """A call of the kernel: queries and keys are each `number` x `length` consecutive tokens."""

    query: tuple[int, int, int]
    """First token, number, length."""
    key: tuple[int, int, int]
    causal: bool
    merges: bool = False
    """Whether the call adds to the result of an earlier call for the same queries."""


def calls_of(groups: Sequence[Group]) -> Iterator[Call]:
    """Yield the calls that compute all groups; consecutive completions of equal length are one call."""
    for group in groups:
        begin = group.start + group.prompt
        if len(group.completions) == 1 or not group.prompt:
            sequence = (group.start, 1, group.prompt + group.completions[0])
            if group.prompt:
                yield Call(sequence, sequence, causal=True)
                continue
        else:
            prompt = (group.start, 1, group.prompt)
            yield Call(prompt, prompt, causal=True)
            yield Call((begin, 1, group.end - begin), prompt, causal=False)
        for length, equal in groupby(group.completions):
            completions = (begin, len(list(equal)), length)
            yield Call(completions, completions, causal=True, merges=group.prompt > 0)
            begin += completions[1] * length


def part(tensor: torch.Tensor, place: tuple[int, int, int]) -> torch.Tensor:
    """Return some tokens of (1, heads, T, …) as (number, heads, length, …), without a copy."""
    start, number, length = place
    return tensor[0, :, start : start + number * length].unflatten(1, (number, length)).transpose(0, 1)


class MergedAttention(torch.autograd.Function):
    """Attention of groups on a CPU, from queries (1, heads, T, size), keys and values to (1, heads, T, size)."""

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
            attention, sums = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, call.causal, scale=scale)
            into, total = part(output, call.query), part(logsumexp, call.query)
            if call.merges:
                merged = torch.logaddexp(total, sums)
                into.mul_((total - merged).exp_()[..., None])
                into.add_(attention.mul_((sums - merged).exp_()[..., None]))
                total.copy_(merged)
            else:
                into.copy_(attention)
                total.copy_(sums)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.groups, ctx.scale = groups, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute the gradient of each call from the merged output and log-sum-exp."""
        query, key, value, output, logsumexp = ctx.saved_tensors
        sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for call in calls_of(ctx.groups):
            tensors = part(query, call.query), part(key, call.key), part(value, call.key)
            merged = part(output, call.query), part(logsumexp, call.query)
            summands = backward(part(gradients[0], call.query), *tensors, *merged, 0.0, call.causal, scale=ctx.scale)
            for total, gradient, place in zip(sums, summands, (call.query, call.key, call.key), strict=True):
                part(total, place).add_(gradient)
        return *sums, None, None


def layout_on(device: torch.device, groups: Sequence[Group]) -> Sequence[Group] | Segments:
    """Return the groups of a sequence as `merged_attention` takes them on a device."""
    return segments_of(groups, device) if device.type == "cuda" else groups


def merged_attention(
    tensors: Sequence[torch.Tensor], layout: Sequence[Group] | Segments, scale: float | None
) -> torch.Tensor:
    """Return the attention of groups, (1, heads, T, size).

    Args:
        tensors: queries, (1, heads, T, size), keys, (1, key-value heads, T, size), and values, like the keys.
        layout: from `layout_on`.
        scale: of the products of queries and keys; None for that of `scaled_dot_product_attention`.
    """
    kind = VarlenAttention if tensors[0].is_cuda else MergedAttention
    return kind.apply(*tensors, layout, scale)


def can_merge(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernels compute these queries, keys and values; tried once for each kind of them."""
    if query.size(-1) != value.size(-1):
        return False
    return is_exact(query.device, query.dtype, query.size(1), key.size(1), query.size(-1))


@cache
def is_exact(device: torch.device, dtype: torch.dtype, heads: int, pairs: int, size: int) -> bool:
    """Try the kernels on few tokens, against attention with a mask: output and gradients have to be equal.

    Args:
        device: of the numbers.
        dtype: of the numbers.
        heads: of the queries.
        pairs: heads of the keys and the values.
        size: of a head.
    """
    groups = (Group(0, 5, (3, 3, 4)), Group(15, 6, (2,)))
    generator = torch.Generator().manual_seed(0)
    part_of = torch.tensor([0] * 5 + [1] * 3 + [2] * 3 + [3] * 4 + [4] * 8)
    visible = part_of[:, None] == part_of
    visible[5:15, :5] = True
    random = (torch.randn(1, number, 23, size, generator=generator) for number in (heads, heads, pairs, pairs))
    gradient, *tensors = (value.to(device, dtype) for value in random)
    attention, mask = torch.nn.functional.scaled_dot_product_attention, visible.tril().to(device)

    def merged(leaves: list[torch.Tensor]) -> torch.Tensor:
        return merged_attention(leaves, layout_on(device, groups), None)

    def masked(leaves: list[torch.Tensor]) -> torch.Tensor:
        return attention(*leaves, mask, enable_gqa=heads != pairs)

    def results_of(way: Callable[[list[torch.Tensor]], torch.Tensor], kind: torch.dtype) -> list[Any]:
        leaves = [tensor.detach().to(kind).requires_grad_() for tensor in tensors]
        output = way(leaves)
        output.backward(gradient.to(kind))
        return [output.detach(), *(tensor.grad for tensor in leaves)]

    # within a checkpointed layer, too, whose hooks would count the tensors that are saved here as the layer's
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with unseen, torch.enable_grad(), torch.autocast(device.type, enabled=False):
        results, _ = tried(lambda: results_of(merged, dtype))
        exact_results = results_of(masked, torch.float32)
    tolerance = 16 * torch.finfo(dtype).eps
    return results is not None and all(
        float((mine - exact).norm()) <= tolerance * float(exact.norm())
        for mine, exact in zip(results, exact_results, strict=True)
    )
