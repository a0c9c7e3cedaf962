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

from grpo.data.task import load_held_out
from grpo.evaluation.in_training import evaluate_policy
from grpo.evaluation.loop import Decoding, Evaluation
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.batch import idle
from grpo.trainer.placement import train_in_float32
from rewards.isolation.reward import Reward
from tests.stock_trl import make, ours, relative_difference, train


def test_a_policy_spread_over_gpus_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = GRPOTrainer.__init__

    def spread(self: GRPOTrainer, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        self.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}  # as accelerate leaves it

    monkeypatch.setattr(GRPOTrainer, "__init__", spread)
    with pytest.raises(ValueError, match=r"several devices \(0, 1\): set CUDA_VISIBLE_DEVICES to one GPU"):
        ours(tmp_path)


QUANTIZED = {
    "quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
}
"""QLoRA, with adapters that are not zero, so that both of their matrices have gradients."""


def test_a_small_step_changes_every_weight_of_an_adapter(tmp_path: Path) -> None:
    before, changed = {}, {}
    for kind in (GRPOTrainer, ExactGRPOTrainer):
        trainer = make(kind, tmp_path, **QUANTIZED, learning_rate=1e-5, adam_epsilon=1e-12, max_steps=1)
        named = {name: weight for name, weight in trainer.model.named_parameters() if "lora_A" in name}
        before = {name: weight.detach().clone() for name, weight in named.items()}
        trainer.train()
        moved = torch.cat([(named[name] != weight).flatten() for name, weight in before.items()])
        changed[kind] = float(moved.float().mean())
    assert changed[GRPOTrainer] < 0.5, "of TRL's bfloat16 most do not change"
    assert changed[ExactGRPOTrainer] > 0.99


def test_the_gradient_on_a_quantized_base_is_stock_trls(tmp_path: Path) -> None:
    stock, mine = (make(GRPOTrainer, tmp_path, **QUANTIZED, max_steps=1), ours(tmp_path, **QUANTIZED, max_steps=1))
    train_in_float32(stock.model)
    mine.model.load_state_dict(stock.model.state_dict(), strict=False)  # adapters, which are random
    (theirs,), (found,) = train(stock).gradients, train(mine).gradients
    assert relative_difference(found, theirs) <= 1e-5


def test_evaluations_of_a_float32_policy_compute_in_bfloat16_too(
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
            evaluation = Evaluation(held_out, grader, Decoding(4), tmp_path / "evaluation.jsonl", 2, console)
            evaluate_policy(trainer, evaluation)
            assert set(dtypes) == {torch.bfloat16}, f"before the training: {trains}"
            dtypes.clear()
            if trains:
                train(trainer)
                dtypes.clear()
    finally:
        grader.close()


def test_the_idle_microbatch_of_a_text_task_has_no_images() -> None:
    ones = torch.ones(2, 3, dtype=torch.long)
    masks = {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones, "completion_mask": ones}
    batch, part = idle({**masks, "advantages": torch.ones(2)})
    assert part.rows == (0,)
    assert not batch["completion_mask"].any()
