"""Attention by a kernel of the hub, with its formula in place of the kernel, which needs a GPU and a download."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import modeling_flash_attention_utils
from transformers.integrations import hub_kernels
from trl import GRPOTrainer

from grpo.options import Update
from tests.stock_trl import doubled, make, ours, relative_difference, train

KERNEL = "kernels-community/flash-attn2"


def attend(query: Any, key: Any, value: Any, scale: float | None, causal: bool) -> torch.Tensor:
    """Attention of a sequence: tensors of tokens, heads and sizes; queries are its last tokens."""
    times = query.size(1) // key.size(1)
    key, value = (of.repeat_interleave(times, 1) for of in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.size(-1) ** -0.5)
    if causal:
        seen = torch.ones_like(scores[0], dtype=torch.bool).tril(key.size(0) - query.size(0))
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> torch.Tensor:
    return torch.stack([attend(*row, softmax_scale, causal) for row in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    bounds = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    return torch.cat([attend(q[a:b], k[c:d], v[c:d], softmax_scale, causal) for (a, b), (c, d) in bounds])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernel's repository as transformers loads it; returns the names that were asked for."""
    asked: list[str] = []

    def get_kernel(name: str, **options: Any) -> SimpleNamespace:
        asked.append(name)
        return SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)

    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *args: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    return asked


@pytest.mark.parametrize("shares", [False, True])
def test_a_kernel_of_the_hub_has_trls_gradient(shares: bool, kernel: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_init_kwargs": {"attn_implementation": KERNEL}}
    update = Update(max_tokens_per_microbatch=100, share_prompts=shares)
    theirs = train(doubled(make(GRPOTrainer, tmp_path / "trl", **options)))
    trainer = doubled(ours(tmp_path / "ours", update, **options))
    assert trainer.model.config._attn_implementation == KERNEL
    record = train(trainer, theirs.weights)
    assert trainer.packing.shared_prompts.results == {"padding": False, "text": True}
    for gradient, expected in zip(record.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) <= 1e-5
    assert KERNEL in kernel
