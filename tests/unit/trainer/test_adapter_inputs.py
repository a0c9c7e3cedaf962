"""Adapters without casts of their inputs, against PEFT's own."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.trainer.adapter_inputs import FirstOfAdapter, keep_inputs_uncast

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}


def adapted(**options: Any) -> Any:
    """Return a policy in bfloat16 with adapters in float32 that do something."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", num_key_value_heads=2, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    policy = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options))
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return policy.train()


def update(policy: Any, autocast: bool) -> tuple[list[torch.Tensor], int]:
    """Return the log-probabilities and the gradients of 30 tokens, and the bytes that autograd has kept."""
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)  # so that no storage is used again
        return tensor

    tensors: list[torch.Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        logits = policy(torch.arange(30).view(2, 15)).logits
    logits.float().log_softmax(-1)[..., 0].sum().backward()
    gradients = [weight.grad for weight in policy.parameters() if weight.requires_grad]
    assert all(gradient.any() for gradient in gradients)
    return [logits.detach(), *gradients], sum(kept.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("autocast", [True, False])
def test_all_numbers_are_pefts_and_less_is_kept(autocast: bool, checkpointing: bool) -> None:
    theirs, ours = adapted(), adapted()
    keep_inputs_uncast(ours)
    if checkpointing:
        for policy in (theirs, ours):
            policy.gradient_checkpointing_enable({"use_reentrant": False})
            policy.enable_input_require_grads()
    (numbers, bytes_of_peft), (own_numbers, own_bytes) = (update(policy, autocast) for policy in (theirs, ours))
    assert all(torch.equal(own, peft) for own, peft in zip(own_numbers, numbers, strict=True))
    assert own_bytes < bytes_of_peft or checkpointing


def test_a_copy_of_a_policy_has_adapters_of_its_own() -> None:
    policy = adapted()
    keep_inputs_uncast(policy)
    twin = copy.deepcopy(policy)
    for name, weight in policy.named_parameters():
        if "lora_A" in name:
            torch.nn.init.zeros_(weight)
    ids = torch.arange(15).view(1, 15)
    with policy.disable_adapter(), torch.no_grad():
        base = policy(ids).logits
    with torch.no_grad():
        assert torch.equal(policy(ids).logits, base)
        assert not torch.equal(twin(ids).logits, base)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_dropout_and_variants_stay_pefts(options: dict[str, Any]) -> None:
    policy = adapted(**options)
    keep_inputs_uncast(policy)
    assert not any(isinstance(module, FirstOfAdapter) for module in policy.modules())
