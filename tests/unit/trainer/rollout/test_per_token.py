"""Log-probabilities of completions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl.kernels import chunked_logprob

from grpo.utils.limits import CACHED_LOGITS
from tests.stock_trl import ours, tiny_llama

COMPLETIONS, LENGTH = 8, 20


def test_on_a_cpu_the_head_computes_few_logits_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of TRL's, and of the float32 copies beside it, is larger than the CPU's caches."""
    tiles: list[int] = []
    fold = chunked_logprob._forward_tile

    def noted(tile: torch.Tensor, *args: Any, **options: Any) -> None:
        tiles.append(tile.numel())
        fold(tile, *args, **options)

    monkeypatch.setattr(chunked_logprob, "_forward_tile", noted)
    trainer = ours(tmp_path, model=tiny_llama(vocabulary=30_000))
    trainer.packing.shared_prompts.decide()
    tiles.clear()
    ids = torch.randint(3, 30_000, (COMPLETIONS, 5 + LENGTH), generator=torch.Generator().manual_seed(0))
    given = (trainer.model, ids, torch.ones_like(ids), LENGTH)
    with torch.no_grad():
        found, entropies, _ = trainer._get_per_token_logps_and_entropies(*given, compute_entropy=True)
        assert max(tiles) <= CACHED_LOGITS < COMPLETIONS * LENGTH * 30_000
        expected = GRPOTrainer._get_per_token_logps_and_entropies(trainer, *given, compute_entropy=True)
    assert max(tiles) > CACHED_LOGITS
    torch.testing.assert_close(found, expected[0])
    torch.testing.assert_close(entropies, expected[1])
