"""The comparison of log-probabilities by policy and engine, without an engine; see also tests of vllm/engine.py."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForImageTextToText, InternVLConfig, InternVLVisionConfig, LlamaConfig

from grpo.run.callbacks import MetricsFile
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout import engine_check
from grpo.trainer.rollout.engine_check import EngineCheck, difference, tolerance
from grpo.utils.errors import GenerationError
from tests.stock_trl import VOCABULARY, ScriptedEngine, ours, rollouts, tiny_llama

NAN = float("nan")


def test_the_difference_is_over_tokens_that_both_have_scored() -> None:
    policy = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, 0.0, 0.0]])
    engine = torch.tensor([[-1.5, NAN, -1.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert difference(policy, engine, mask) == pytest.approx(0.75)
    assert difference(policy, engine, torch.zeros_like(mask)) == 0.0


def test_the_tolerance_follows_from_the_bits_of_the_data_type() -> None:
    ratio = torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float16).eps
    assert tolerance("bfloat16", "cuda") / tolerance("float16", "cuda") == pytest.approx(ratio, rel=0.1)
    assert tolerance("float32", "cuda") == tolerance("float16", "cuda"), "as GPUs may multiply it as TF32"
    assert tolerance("float32", "cpu") < tolerance("float32", "cuda") / 10


def checked(directory: Path, shift: float, **options: Any) -> ExactGRPOTrainer:
    """A trainer whose engine has the policy's log-probabilities, shifted."""
    trainer = ours(directory, rollout_func=None, **options)
    ScriptedEngine(trainer, shift)
    trainer.add_callback(MetricsFile(directory / "metrics.jsonl"))
    return trainer


@pytest.mark.parametrize(
    "options",
    [{}, {"peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)}],
    ids=["full", "dropout"],
)
def test_a_healthy_engine_is_checked_first_and_at_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(engine_check, "EVERY", 3)
    trainer = checked(tmp_path, shift=0.0, max_steps=5, learning_rate=1e-2, **options)
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("engine/is_policy") for row in rows] == [1.0, None, None, 1.0, None]
    assert 0 < rows[3]["engine/logp_difference"] < 1e-5
    assert rows[3]["engine/tolerance"] == engine_check.ON_CPU


def unknown(model: Any, ids: torch.Tensor, mask: torch.Tensor, length: int, *args: Any, **options: Any) -> Any:
    """Log-probabilities that are not numbers."""
    return torch.full((len(ids), length), NAN), None, None


@pytest.mark.parametrize("shift", [0.01, 0.0])
def test_an_engine_with_other_weights_ends_the_run(tmp_path: Path, shift: float) -> None:
    trainer = checked(tmp_path, shift, max_steps=5)
    if not shift:  # a policy without a number is not the engine either
        trainer._get_per_token_logps_and_entropies = unknown
    with pytest.raises(GenerationError, match="the engine is not the policy: their log-probabilities differ by"):
        trainer.train()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["engine/is_policy"]) == (0, 0.0)
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"generation_kwargs": {"top_k": 5}}], ids=str)
def test_filters_of_log_probabilities_are_not_taken_for_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = checked(tmp_path, shift=0.5, max_steps=1, **options)
    trainer.train()
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("use_vllm", [False, True])
def test_a_script_that_generates_is_warned_at_most_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, use_vllm: bool
) -> None:
    def placeholders(prompts: list[str], trainer: ExactGRPOTrainer) -> dict[str, Any]:
        found = rollouts(prompts, trainer)
        return found | {"logprobs": [[0.0] * len(ids) for ids in found["completion_ids"]]}

    trainer = ours(tmp_path, rollout_func=placeholders, max_steps=2)
    if use_vllm:
        ScriptedEngine(trainer)
        trainer.rollout_func = placeholders
    monkeypatch.setattr(engine_check, "EVERY", 1)
    trainer.train()
    assert trainer.state.global_step == 2
    assert caplog.text.count("rollout_func") == use_vllm


def test_images_in_tiles_follow_their_prompts_into_the_check(tmp_path: Path) -> None:
    """InternVL's tensors have tiles, and a prompt any number of them."""
    tower = InternVLVisionConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[8, 8],
        patch_size=[4, 4],
    )
    image, text = VOCABULARY - 1, LlamaConfig.from_pretrained(tiny_llama())
    config = InternVLConfig(vision_config=tower, text_config=text, image_token_id=image, image_seq_length=1)
    trainer = ours(tmp_path, model=AutoModelForImageTextToText.from_config(config), rollout_func=None)
    ScriptedEngine(trainer)
    prompts, completions = torch.tensor([[0, 0, 5, image], [5, image, image, image]]), torch.tensor([[7, 8], [9, 10]])
    images = {"pixel_values": torch.randn(4, 3, 8, 8), "num_images": [1, 1], "num_tiles": [1, 3]}
    ids, mask = torch.cat((prompts, completions), 1), torch.cat((prompts != 0, completions != 0), 1).long()
    with torch.no_grad():
        logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model.eval(), ids, mask, 2, **images)
    trainer.model.train()
    parts = {"prompt_ids": prompts, "prompt_mask": mask[:, :4], "completion_ids": completions}
    parts |= {"completion_mask": mask[:, 4:], "sampling_per_token_logps": logps}
    found = EngineCheck("float32", "cpu", of_script=False).compare(trainer, parts | images)
    assert found["engine/logp_difference"] == pytest.approx(0.0, abs=1e-6)
