"""An adapter on its way to vLLM: the file and what is in it."""

import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from grpo.config.schema import ROOT
from grpo.generation.vllm import policy_weights
from grpo.generation.vllm.policy_weights import adapter_file, adapter_weights

TINY = ROOT / "grpo" / "builtin" / "tiny"


@pytest.fixture
def policy() -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="float32")
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def test_the_file_is_peft_s_own_and_is_gone_afterwards(policy: PeftModel) -> None:
    with adapter_file(policy, adapter_weights(policy, lambda weights: nullcontext())) as folder:
        modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert (stat.S_IMODE(folder.stat().st_mode), modes) == (0o700, {0o600})
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(TINY, dtype="float32"), folder)
    assert not folder.exists()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(read.eval()(ids).logits, policy.eval()(ids).logits)


def test_later_training_does_not_change_what_is_sent(policy: PeftModel) -> None:
    sent = adapter_weights(policy, lambda weights: nullcontext())
    before = {name: weight.clone() for name, weight in sent.items()}
    for weight in policy.parameters():
        weight.data.add_(1)
    assert all(torch.equal(sent[name], before[name]) for name in sent)


def test_without_room_in_memory_the_file_is_on_disk(
    policy: PeftModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_weights, "SHARED_MEMORY", tmp_path / "none")
    with adapter_file(policy, adapter_weights(policy, lambda weights: nullcontext())) as folder:
        assert (folder / "adapter_model.safetensors").is_file()
    assert not folder.exists()
