"""Attention of a prompt and its completions by PyTorch's flash kernels, without copies of the prompt's keys.

All completions of a prompt attend to it in one call without a mask, and each to itself in a causal one. The two are
merged by their log-sum-exps. A kernel's backward pass needs nothing of the forward pass but the output and the
log-sum-exp: given the merged ones, it returns its part of the gradient, as in ring attention (2310.01889).

On a CPU each prompt has calls of its own; on a GPU those of all prompts are two (`varlen.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch

from grpo.trainer.shared_prompts import varlen
from grpo.trainer.shared_prompts.layout import Group
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
    """Return some tokens of (T, heads, …) as (number, heads, length, …), without a copy."""
    start, number, length = place
    return tensor[start : start + number * length].unflatten(0, (number, length)).transpose(1, 2)


def as_tensor(groups: Sequence[Group]) -> torch.Tensor:
    """Return the calls for groups as integers, eight of each, which a compiled layer takes."""
    calls = [(*call.query, *call.key, call.causal, call.merges) for call in calls_of(groups)]
    return torch.tensor(list(chain.from_iterable(calls)))  # and no view, which layers would be compiled for


def calls_in(layout: Sequence[torch.Tensor]) -> Iterator[Call]:
    """Yield the calls of `as_tensor`."""
    for row in layout[0].view(-1, 8).tolist():
        yield Call(tuple(row[:3]), tuple(row[3:6]), bool(row[6]), bool(row[7]))


def forward_on_cpu(
    tensors: Sequence[torch.Tensor], layout: Sequence[torch.Tensor], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output, (T, heads, size), and log-sum-exp, (T, heads), of all calls, merged."""
    query, key, value = tensors
    output = query.new_empty(query.shape)
    logsumexp = query.new_empty(query.shape[:2], dtype=torch.float32)
    for call in calls_in(layout):
        parts = part(query, call.query), part(key, call.key), part(value, call.key)
        attention, sums = aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, call.causal, scale=scale)
        into, total = part(output, call.query), part(logsumexp, call.query)
        if call.merges:
            merged = torch.logaddexp(total, sums)
            into.mul_((total - merged).exp_()[..., None])
            into.add_(attention.mul_((sums - merged).exp_()[..., None]))
            total.copy_(merged)
        else:
            into.copy_(attention)
            total.copy_(sums)
    return output, logsumexp


def backward_on_cpu(
    gradient: torch.Tensor, tensors: Sequence[torch.Tensor], layout: Sequence[torch.Tensor], scale: float | None
) -> Sequence[torch.Tensor]:
    """Return the gradients of queries, keys and values; tensors are these, output and log-sum-exp."""
    query, key, value, output, logsumexp = tensors
    sums = [tensor.new_zeros(tensor.shape) for tensor in (query, key, value)]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    for call in calls_in(layout):
        parts = part(query, call.query), part(key, call.key), part(value, call.key)
        merged = part(output, call.query), part(logsumexp, call.query)
        summands = backward(part(gradient, call.query), *parts, *merged, 0.0, call.causal, scale=scale)
        for total, summand, place in zip(sums, summands, (call.query, call.key, call.key), strict=True):
            part(total, place).add_(summand)
    return sums


@torch.library.custom_op("grpo::attend_groups", mutates_args=())
def attend_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: list[torch.Tensor], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of groups, (T, heads, size), and log-sum-exps; an operator, so that layers can be compiled.

    Args:
        query: (T, heads, size).
        key: (T, key-value heads, size).
        value: like the keys.
        layout: from `layout_on`.
        scale: of the products of queries and keys; None for that of `scaled_dot_product_attention`.
    """
    forward = varlen.forward if query.is_cuda else forward_on_cpu
    return forward((query, key, value), layout, scale)


@torch.library.custom_op("grpo::attend_groups_backward", mutates_args=())
def attend_groups_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    layout: list[torch.Tensor],
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, from that of the output."""
    backward = varlen.backward if query.is_cuda else backward_on_cpu
    of_query, of_key, of_value = backward(gradient, (query, key, value, output, logsumexp), layout, scale)
    return of_query, of_key, of_value


@attend_groups.register_fake
def _(query: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    sums = (heads, tokens) if query.is_cuda else (tokens, heads)
    return query.new_empty(query.shape), query.new_empty(sums, dtype=torch.float32)


@attend_groups_backward.register_fake
def _(gradient: torch.Tensor, *tensors: Any) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in tensors[:3])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, layout, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output, *layout)


def _backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:
    saved = ctx.saved_tensors
    tensors, layout = saved[:5], list(saved[5:])
    return *attend_groups_backward(gradient.contiguous(), *tensors, layout, ctx.scale), [None] * len(layout), None


attend_groups.register_autograd(_backward, setup_context=_keep)


def layout_on(device: torch.device, groups: Sequence[Group]) -> list[torch.Tensor]:
    """Return the groups of a sequence as `merged_attention` takes them on a device."""
    return varlen.segments_of(groups, device) if device.type == "cuda" else [as_tensor(groups)]


def merged_attention(tensors: Sequence[torch.Tensor], layout: list[torch.Tensor], scale: float | None) -> torch.Tensor:
    """Return the attention of groups, (1, T, heads, size).

    Args:
        tensors: queries, (1, heads, T, size), keys, (1, key-value heads, T, size), and values, like the keys.
        layout: from `layout_on`.
        scale: of the products of queries and keys; None for that of `scaled_dot_product_attention`.
    """
    return attend_groups(*(tensor[0].transpose(0, 1) for tensor in tensors), layout, scale)[0][None]


def can_merge(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernels compute these queries, keys and values; tried once for each kind of them."""
    if query.size(-1) != value.size(-1):
        return False
    return known_exact(query.device, query.dtype, query.size(1), key.size(1), query.size(-1))


@torch.compiler.assume_constant_result
def known_exact(*kind: Any) -> bool:
    """Return `is_exact`, which a compiled layer asks once, while it is compiled."""
    return is_exact(*kind)


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
        return merged_attention(leaves, layout_on(device, groups), None).transpose(1, 2)

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
