"""What only GPUs show: a policy over several of them, weights under a gradient scaler, precision of evaluations."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from peft import LoraConfig
from rich.console import Console
from transformers import BitsAndBytesConfig
from trl import GRPOTrainer

from grpo.data import load_held_out
from grpo.evaluation.in_training import evaluate_policy
from grpo.trainer.batch import idle
from rewards.runtime.isolation import Reward
from tests.stock_trl import make, ours, train

LORA = LoraConfig(r=4, target_modules="all-linear")


def test_a_policy_that_is_spread_over_gpus_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GRPOTrainer.__init__

    def spread(self: GRPOTrainer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}  # as accelerate leaves it

    monkeypatch.setattr(GRPOTrainer, "__init__", spread)
    with pytest.raises(ValueError, match=r"several devices \(0, 1\): set CUDA_VISIBLE_DEVICES to one GPU"):
        ours(tmp_path)


def test_trained_weights_are_float32_under_float16_also_on_a_quantized_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    options = {"quantization_config": quantization, "peft_config": LORA}
    stock = make(GRPOTrainer, tmp_path, **options)
    dtypes = {weight.dtype for weight in stock.model.parameters() if weight.requires_grad}
    assert dtypes == {torch.bfloat16}, "TRL's, for which this is"
    made = GRPOTrainer.__init__

    def in_float16(self: GRPOTrainer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.args.fp16 = True  # which accelerate refuses on a CPU

    monkeypatch.setattr(GRPOTrainer, "__init__", in_float16)
    mine = ours(tmp_path, **options)
    assert {weight.dtype for weight in mine.model.parameters() if weight.requires_grad} == {torch.float32}


def test_both_evaluations_of_a_policy_in_float32_compute_in_bfloat16_as_its_training_does(
    tmp_path: Path, composed: Callable[..., DictConfig]
) -> None:
    held_out, _ = load_held_out(composed("task.eval.size=2").task)
    trainer = ours(tmp_path, bf16=True, use_cpu=True, max_steps=1)
    dtypes: list[torch.dtype] = []
    trainer.model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    grader = Reward("rewards.correctness.correctness", "correctness")
    try:
        for trains in (True, False):
            console = Console(file=io.StringIO())
            evaluate_policy(trainer, held_out, grader, 4, 2, None, tmp_path / "evaluation.jsonl", console)
            assert set(dtypes) == {torch.bfloat16}, f"before the training: {trains}"
            dtypes.clear()
            if trains:
                train(trainer)
                dtypes.clear()
    finally:
        grader.close()


def test_the_idle_microbatch_of_a_text_task_has_no_number_of_images() -> None:
    ones = torch.ones(2, 3, dtype=torch.long)
    masks = {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones, "completion_mask": ones}
    batch, part = idle({**masks, "advantages": torch.ones(2), "num_images": None})
    assert part.rows == (0,)
    assert not batch["completion_mask"].any()
