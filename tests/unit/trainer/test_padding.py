"""Policies whose log-probabilities depend on padding, or on other tokens than a shared prompt's: as in stock TRL."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer

from grpo.trainer import ExactGRPOTrainer, Update
from tests.stock_trl import VOCABULARY, make, relative_difference, rollouts, tiny_llama, train

INVOCATION = [41, 42]


def gpt2() -> Any:
    """A policy with learned positions, which TRL counts from the padding on."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "bos_token_id": 1, "eos_token_id": 1}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = AutoConfig.for_model("gpt2", vocab_size=VOCABULARY, initializer_range=0.2, **sizes, **dropout)
    return AutoModelForCausalLM.from_config(config)


def norms_after_rotation() -> Any:
    """A policy whose rotated keys have norms with weights other than 1, as trained ones have."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("hunyuan_v1_dense", initializer_range=0.2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        if "layernorm" in name and ("query" in name or "key" in name):
            weight.data += torch.randn_like(weight)
    return model


@functools.cache
def saved(make_policy: Any) -> str:
    """The folder of a policy, from which TRL loads its reference, too."""
    folder = tempfile.mkdtemp(prefix="policy-")
    atexit.register(shutil.rmtree, folder)
    make_policy().save_pretrained(folder)
    return folder


def invoked(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Rollouts whose prompts end with what activates an activated LoRA."""
    made = rollouts(prompts, trainer)
    return made | {"prompt_ids": [[*ids, *INVOCATION] for ids in made["prompt_ids"]]}


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [(sum(ids) % 7) / 3 for ids in completion_ids]


def llama(kind: Any, **options: Any) -> Any:
    """The tiny Llama with an adapter."""
    return lambda: {"model": tiny_llama(), "peft_config": kind(task_type="CAUSAL_LM", **options)}


ACTIVATED = {"alora_invocation_tokens": INVOCATION, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj"]}
POLICIES: dict[str, Any] = {
    "learned positions": lambda: {"model": saved(gpt2)},
    "norms after the rotation": lambda: {"model": saved(norms_after_rotation)},
    "prompt tuning": llama(PromptTuningConfig, num_virtual_tokens=4),
    "prefix tuning": llama(PrefixTuningConfig, num_virtual_tokens=4),
    "activated LoRA": lambda: {**llama(LoraConfig, **ACTIVATED)(), "rollout_func": invoked},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_depends_on_padding_trains_as_in_trl(policy: str, tmp_path: Path) -> None:
    options = {"beta": 0.1, "reward_funcs": reward, "num_iterations": 2, "max_steps": 4}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}
    stock = train(make(GRPOTrainer, tmp_path, **POLICIES[policy](), **options))
    ours = train(
        make(ExactGRPOTrainer, tmp_path, update=Update(200), **POLICIES[policy](), **options), start_from=stock.weights
    )
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        zero = {name: torch.zeros_like(value) for name, value in theirs.items()}
        assert relative_difference(zero | mine, theirs) <= 1e-5
    assert max(row["update/microbatches"] for row in ours.logs) > 1


@pytest.mark.parametrize("policy", ["learned positions", "norms after the rotation", "prompt tuning"])
def test_a_policy_that_stays_the_same_is_not_clipped(policy: str, tmp_path: Path) -> None:
    """Old log-probabilities, and a reference's, come from other micro-batches than the policy's."""
    options = {"beta": 0.1, "learning_rate": 0.0, "max_steps": 4, "num_iterations": 2, "steps_per_generation": 4}
    options |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "reward_funcs": reward}
    if "tuning" in policy:  # its reference is the policy without the adapter
        options["beta"] = 0.0
    record = train(make(ExactGRPOTrainer, tmp_path, update=Update(120), **POLICIES[policy](), **options))
    assert [row["clip_ratio/region_mean"] for row in record.logs] == [0.0] * 4
    assert all(abs(row.get("kl", 0.0)) <= 1e-6 for row in record.logs)


def test_other_policies_are_trimmed_and_share_prompts(tmp_path: Path) -> None:
    trainer = make(ExactGRPOTrainer, tmp_path)
    trainer.packing.shared_prompts.decide()
    assert trainer.packing.shared_prompts.results == {"padding": False, "text": True}
    assert trainer.packing.trims


def test_the_noise_of_neftune_has_the_amplitude_of_trl(tmp_path: Path) -> None:
    """It is divided by the root of the length with padding."""
    trainer = make(ExactGRPOTrainer, tmp_path, neftune_noise_alpha=5)
    assert not trainer.step_update.traits.divisible
