"""A cache with each prompt once; test_at_once.py compares its completions with those of `generate` alone."""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo.generation.transformers.continuous_batch import ContinuousBatch
from grpo.generation.transformers.growing_cache import GrowingCache
from grpo.generation.transformers.prompt_cache import PromptCache, why_repeated
from grpo.generation.transformers.trial import why_not_joined

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97, "initializer_range": 0.3},
}


def policy(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **options), dtype=dtype).eval()


def cache_of(prompts: int, tokens: int, start: float = 0.0) -> PromptCache:
    """Each number in it is that of the prompt."""
    read = GrowingCache(AutoConfig.for_model("llama", **SIZES))
    for layer in range(2):
        keys = torch.arange(start, start + prompts)[:, None, None, None].expand(-1, 2, tokens, 8)
        read.update(keys, keys, layer)
    return PromptCache(read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_prompt_is_read_as_if_it_were_repeated(dtype: torch.dtype, autocast: bool) -> None:
    """Qwen3's norm makes keys of another type than values where autocast is on."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert why_not_joined(policy("qwen3", dtype), ContinuousBatch(shares_from=0)) is None


def test_completions_have_prompts_of_their_own_and_shared_keys() -> None:
    cache = cache_of(2, 5)
    cache.batch_select_indices(torch.tensor([0, 0, 1]))
    own = torch.tensor([10.0, 11.0, 12.0])[:, None, None, None].expand(-1, 2, 1, 8)
    assert cache.update(own, own, 0)[0].shape == (3, 2, 1, 8)
    cache.update(own, own, 1)
    assert cache.get_seq_length() == 6
    assert len(cache.layers[0].prompt_keys) == 2
    cache.batch_select_indices(torch.tensor([1, 2]))
    alone = [[layer.keys[0, 0, :, 0].tolist() for layer in cache.row(row, 3).layers] for row in (0, 1)]
    assert alone == [[[0.0, 0.0, 11.0]] * 2, [[1.0, 1.0, 12.0]] * 2]


def test_prompts_whose_completions_have_ended_are_dropped() -> None:
    before, cache = cache_of(3, 5), cache_of(1, 7, start=3.0)
    before.batch_select_indices(torch.tensor([0, 2, 2]))
    cache.batch_select_indices(torch.tensor([0, 0]))
    cache.join(before)
    layer = cache.layers[0]
    assert layer.prompt_keys[:, 0, :, 0].tolist() == [[0.0] * 7, [0.0, 0.0] + [2.0] * 5, [3.0] * 7]
    assert cache.prompt_of.tolist() == [0, 1, 1, 2, 2]


def test_what_cannot_share_keys_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "window" in (why_repeated(policy("mistral", sliding_window=4)) or "")
    assert "eager" in (why_repeated(policy(attn_implementation="eager")) or "")
    assert "CPU" in (why_repeated(policy().to("meta")) or "")

    def of_its_own(masked: bool, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, mask if masked else None, **options)

    functions = "transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface"
    for masked, reason in ((True, "PromptMask"), (False, "logits differ")):
        attention = partial(of_its_own, masked)
        monkeypatch.setattr(functions, lambda *_, attention=attention: attention)
        assert reason in (why_not_joined(policy(), ContinuousBatch(shares_from=0)) or "")
