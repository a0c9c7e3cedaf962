"""A cache with room for the next tokens, against transformers' own."""

import pytest
import torch
from transformers import AutoConfig
from transformers.cache_utils import DynamicCache

from grpo.generation.transformers.growing_cache import ROOM, GrowingCache

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LLAMA = AutoConfig.for_model("llama", **SIZES)
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
MIXED = AutoConfig.for_model("gemma3_text", **SIZES, **WINDOW)


@pytest.mark.parametrize("config", [LLAMA, MIXED], ids=["full attention", "a window in a layer"])
def test_keys_and_values_are_those_of_transformers_cache(config: AutoConfig) -> None:
    ours, theirs = GrowingCache(config), DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)
    rows = 3
    for step in range(2 * ROOM + 8):
        for layer in range(2):
            shape = (rows, 1 if step else 5, 2, 8)  # transposed, as a model's
            keys, values = (torch.randn(*shape, generator=generator).transpose(1, 2) for _ in range(2))
            for mine, other in zip(ours.update(keys, values, layer), theirs.update(keys, values, layer), strict=True):
                assert torch.equal(mine, other)
        if step in (0, 9, ROOM + 9):  # each prompt for two completions, then without one of them
            chosen = torch.tensor([0, 0, 1, 1, 2, 2] if step == 0 else list(range(1, rows)))
            rows = len(chosen)
            for cache in (ours, theirs):
                cache.batch_select_indices(chosen)
    assert ours.get_seq_length() == theirs.get_seq_length() == 2 * ROOM + 12


def test_many_tokens_are_added_before_a_layer_is_copied() -> None:
    cache = GrowingCache(LLAMA)
    keys = [cache.update(*torch.ones(2, 3, 2, 1, 8), 0)[0] for _ in range(18)]  # all kept, so that no memory is reused
    assert len({tensor.untyped_storage().data_ptr() for tensor in keys}) == 2


def test_rows_that_are_kept_have_room_for_more_tokens() -> None:
    cache = GrowingCache(LLAMA)
    for _ in range(2):
        cache.update(*torch.ones(2, 3, 2, 1, 8), 0)
    cache.batch_select_indices(torch.tensor([2]))
    before = cache.layers[0].keys.untyped_storage().data_ptr()
    assert cache.update(*torch.ones(2, 1, 2, 1, 8), 0)[0].untyped_storage().data_ptr() == before
