"""Feed-forward layers in tiles of tokens; tests/combinations compares their gradient with stock TRL's."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.trainer.tiled_mlp import tile_mlps

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
DENSE = ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "olmo2", "granite", "smollm3", "glm4"]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_have_the_gradient_of_the_whole(family: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, seen = torch.randint(1, 32, (3, 11)), list[int]()

    def results(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = model(ids).logits
        logits.logsumexp(-1).square().sum().backward()
        return logits.detach(), [weight.grad for weight in model.parameters()]

    tiled = copy.deepcopy(model)
    tile_mlps(10, tiled)
    tiled = copy.deepcopy(tiled)  # a copy computes with its own weights
    for layer in tiled.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:-1].numel()))
    (expected, gradients), (found, others) = results(model), results(tiled)
    torch.testing.assert_close(found, expected)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient)
    assert max(seen) == 9, "three rows of three tokens"
    again = 22 if checkpointing else 16  # checkpointing of layers needs all but the last of its four tiles
    assert len(seen) >= again, "in the backward pass each tile is computed again"
    with torch.no_grad():
        torch.testing.assert_close(tiled(ids).logits, expected)


def test_tiles_of_several_rows_are_contiguous() -> None:
    """GPT-2's layers view their input."""
    sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    ids = torch.randint(1, 32, (3, 11))
    expected = model(ids).logits
    tile_mlps(10, model)
    torch.testing.assert_close(model(ids).logits, expected)


def test_a_policy_of_mixtures_alone_is_refused() -> None:
    config = AutoConfig.for_model("qwen3_moe", **SIZES, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2)
    with pytest.raises(ValueError, match="no dense feed-forward layers"):
        tile_mlps(8, AutoModelForCausalLM.from_config(config))
