"""PyTorch's flash attention for sequences of different lengths, which only a GPU has, by its formula."""

from itertools import pairwise
from typing import Any

import torch


class Kernel:
    """Stands for `torch.ops.aten` in `grpo.trainer.shared_prompts.varlen`."""

    @staticmethod
    def visible(queries: int, keys: int, causal: bool) -> torch.Tensor:
        seen = torch.ones(queries, keys, dtype=torch.bool)
        return seen.tril(keys - queries) if causal else seen

    @classmethod
    def _flash_attention_forward(
        cls, query: Any, key: Any, value: Any, of_q: Any, of_k: Any, max_q: int, max_k: int, *rest: Any, scale: Any
    ) -> tuple[torch.Tensor, ...]:
        _, causal, _ = rest
        output, sums = torch.empty_like(query), torch.empty(query.size(1), query.size(0))
        times = query.size(1) // key.size(1)
        for (a, b), (c, d) in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True):
            assert b - a <= max_q
            assert d - c <= max_k
            q, k, v = query[a:b], *(of[c:d].repeat_interleave(times, 1) for of in (key, value))
            scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or query.size(-1) ** -0.5)
            scores = scores.masked_fill(~cls.visible(b - a, d - c, causal), -torch.inf)
            sums[:, a:b] = scores.logsumexp(-1)
            output[a:b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return output, sums, torch.empty(0), torch.empty(0), torch.empty(0)

    @classmethod
    def _flash_attention_backward(
        cls,
        given: Any,
        query: Any,
        key: Any,
        value: Any,
        output: Any,
        sums: Any,
        of_q: Any,
        of_k: Any,
        *rest: Any,
        scale: Any,
    ) -> tuple[torch.Tensor, ...]:
        causal, scale, times = rest[3], scale or query.size(-1) ** -0.5, query.size(1) // key.size(1)
        dq, dk, dv = (torch.zeros_like(of) for of in (query, key, value))
        for (a, b), (c, d) in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True):
            q, k, v = query[a:b], *(of[c:d].repeat_interleave(times, 1) for of in (key, value))
            seen = cls.visible(b - a, d - c, causal)
            weights = (torch.einsum("qhd,khd->hqk", q, k) * scale - sums[:, a:b, None]).exp() * seen
            delta = (given[a:b] * output[a:b]).sum(-1).t()[..., None]
            errors = weights * (torch.einsum("qhd,khd->hqk", given[a:b], v) - delta) * scale
            dq[a:b] = torch.einsum("hqk,khd->qhd", errors, k)
            dk[c:d] = torch.einsum("hqk,qhd->khd", errors, q).unflatten(1, (-1, times)).sum(2)
            dv[c:d] = torch.einsum("hqk,qhd->khd", weights, given[a:b]).unflatten(1, (-1, times)).sum(2)
        return dq, dk, dv
