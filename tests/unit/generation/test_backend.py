"""A backend of its own, in one file: what a training needs of it, and what it is refused for."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from omegaconf import DictConfig
from peft import LoraConfig
from transformers import AutoTokenizer, GenerationConfig

from grpo.builtin.tasks.calculator import calculator
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.generation.backend import Backend, backend_class
from grpo.generation.vllm.policy_weights import merged_weights
from grpo.options import Engine
from grpo.utils.errors import ConfigError, GenerationError
from tests.stock_trl import compare_engine_at, ours, reward

CALCULATOR = ROOT / "grpo" / "builtin" / "tiny_calculator"


class Copy(Backend):
    """Generates by transformers, with a copy of the policy, which gets the policy's weights."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        base = self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model
        self.copy = type(base)(copy.deepcopy(base.config))
        self.how: dict[str, Any] = {"do_sample": True, "temperature": options["temperature"], "top_k": 0}
        self.synced = 0

    def sync_weights(self) -> None:
        weights = merged_weights(self.model) if hasattr(self.model, "peft_config") else self.model.named_parameters()
        self.copy.load_state_dict(dict(weights), strict=False)
        self.synced += 1

    @contextmanager
    def greedy(self) -> Iterator[None]:
        before, self.how = self.how, {"do_sample": False}
        yield
        self.how = before

    @torch.no_grad()
    def generate(self, prompts: list, images: list | None, num_generations: int, profiler: Any = None) -> tuple:
        completions, logps = [], []
        length, end = self.options["max_completion_length"], self.copy.config.eos_token_id
        for prompt in prompts:
            config = GenerationConfig(max_new_tokens=length, pad_token_id=0, eos_token_id=end, **self.how)
            found = self.copy.generate(torch.tensor([prompt]), generation_config=config)[0]
            scored = self.copy(found[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            completion = found[len(prompt) :]
            completions.append(completion.tolist())
            logps.append([[value] for value in scored[range(len(completion)), completion].tolist()])
        return prompts, completions, logps, None


class Stale(Copy):
    """Keeps the weights that it has begun with."""

    def sync_weights(self) -> None:
        pass


def training(folder: Path, backend: type[Backend], **options: Any) -> Any:
    engine = Engine(lora="merged", backend=f"{__name__}.{backend.__name__}")
    return ours(folder, engine=engine, use_vllm=True, rollout_func=None, reward_funcs=reward, **options)


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
def test_a_backend_of_its_own_generates_with_the_policys_weights(tmp_path: Path, lora: bool) -> None:
    adapter = LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear") if lora else None
    trainer = training(tmp_path, Copy, max_steps=3, peft_config=adapter)
    compare_engine_at(trainer, 0)
    trainer.train()
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert trainer.vllm_generation.synced == 3
    assert logged[0]["engine/is_policy"] == 1
    assert all(row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in logged)
    assert all(row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3) for row in logged)
    assert all(0 <= row["rollout_corr/k3_kl"] < 1e-8 for row in logged)
    assert all(row["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1) for row in logged)


def test_a_backend_of_its_own_takes_turns_with_tools(tmp_path: Path) -> None:
    calls = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{number} + 2"}]} for number in range(8)])
    known = {"model": str(CALCULATOR), "processing_class": AutoTokenizer.from_pretrained(CALCULATOR)}
    options = {"tools": [calculator], "train_dataset": calls, "max_completion_length": 60, "max_steps": 1}
    trainer = training(tmp_path, Copy, **known, **options)
    generate, calling = trainer._generate_single_turn, trainer.processing_class
    call = calling('<tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>')["input_ids"]
    turns: list[int] = []

    def first_a_call(prompts: list, *args: Any, **how: Any) -> tuple:
        turns.append(len(prompts))
        if len(turns) == 1:
            return [[*call, calling.eos_token_id] for _ in prompts], [[-1.0] * (len(call) + 1) for _ in prompts]
        return generate(prompts, *args, **how)

    trainer._generate_single_turn = first_a_call
    compare_engine_at(trainer, math.inf)  # the call is nobody's
    trainer.train()
    assert len(turns) >= 2


def test_a_backend_with_other_weights_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="the engine is not the policy"):
        training(tmp_path, Stale, max_steps=1).train()


def test_an_evaluation_asks_for_the_likeliest_completions(tmp_path: Path) -> None:
    trainer = training(tmp_path, Copy)
    trainer.vllm_generation.sync_weights()
    prompt = trainer.processing_class("1 2 3")["input_ids"]
    first, second = (trainer.vllm_generation.complete([prompt]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no.such.module", "No module named 'no'"),
        ("grpo.generation.backend.Nothing", "has no attribute 'Nothing'"),
        ("pathlib.Path", "not a subclass of grpo.generation.backend.Backend"),
    ],
)
def test_a_name_that_is_no_backend_is_one_line(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.backend={name}: .*{problem}"):
        backend_class(name)


def test_a_backend_of_its_own_gets_all_weights(composed: Callable[..., DictConfig]) -> None:
    line = ("generation=vllm_colocate", "peft=lora", "engine.backend=mine.Backend")
    transport = resolve(composed(*line), None).transport
    assert not transport.adapter
    assert transport.merged_because == "engine.backend=mine.Backend takes all weights, into its own"
