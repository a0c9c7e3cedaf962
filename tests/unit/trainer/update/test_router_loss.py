"""The loss of a mixture's routers: TRL's gradient and metric, in micro-batches with shared prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer

from grpo.options import LOSS_MEANS
from grpo.trainer import ExactGRPOTrainer, Update
from tests.derived_losses import AS_TRL, MAXRL
from tests.stock_trl import KL_FOUR_SLICES, make, ours, relative_difference, tiny_mixture, train

SPLIT, SHARED = Update(100, share_prompts=False), Update(40)
FOUR = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4}
ADAPTERS = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
CASES: dict[str, tuple[str, Update, dict[str, Any]]] = {
    "split": ("mixtral", SPLIT, {}),
    "shared": ("mixtral", SHARED, {}),
    "Qwen3-MoE": ("qwen3_moe", SHARED, KL_FOUR_SLICES),
    "gpt-oss": ("gpt_oss", SHARED, KL_FOUR_SLICES),
    "OLMoE, split": ("olmoe", SPLIT, KL_FOUR_SLICES),
    "LoRA": ("mixtral", SHARED, FOUR | ADAPTERS),
    "truncated": ("mixtral", SHARED, FOUR | {"mask_truncated_completions": True}),
    "truncated, split": ("mixtral", SPLIT, FOUR | {"mask_truncated_completions": True, "loss_type": "bnpo"}),
    **{loss: ("mixtral", SHARED, FOUR | {"loss_type": loss}) for loss in LOSS_MEANS},
    "maxrl": ("mixtral", SHARED, FOUR | MAXRL),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_router_loss_are_those_of_stock_trl(case: str, tmp_path: Path) -> None:
    family, update, options = CASES[case]
    kind, as_trl, _ = AS_TRL.get(case, (GRPOTrainer, {}, {}))
    torch.manual_seed(0)  # of the adapters
    theirs = train(make(kind, tmp_path, model=tiny_mixture(family), **options | as_trl))
    torch.manual_seed(0)
    trainer = make(ExactGRPOTrainer, tmp_path, update=update, model=tiny_mixture(family), **options)
    mine = train(trainer, start_from=theirs.weights)
    for gradient, stock in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, stock) <= 1e-5
    for log, stock_log in zip(mine.logs, theirs.logs, strict=True):
        assert log["aux_loss"] == pytest.approx(stock_log["aux_loss"], rel=1e-5)
        assert log["update/microbatches"] > 1
        assert log["update/rows_skipped"] == 0
    assert trainer.packing.shared_prompts.results == {"padding": False, "text": True}


@pytest.mark.parametrize("passes", [(1,), (2,), (3,)], ids=["counting", "counting later", "update"])
def test_the_gradient_is_the_same_after_memory_ran_out(passes: tuple[int, ...], tmp_path: Path) -> None:
    untouched = train(ours(tmp_path, SHARED, model=tiny_mixture(), max_steps=1))
    assert untouched.logs[0]["update/microbatches"] == 2
    trainer = ours(tmp_path, SHARED, model=tiny_mixture(), max_steps=1)
    trainer.packing.shared_prompts.applies({})  # the trial is over before
    calls = 0

    def fault(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in passes:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.model.model.layers[0].register_forward_pre_hook(fault)
    faulty = train(trainer)
    assert faulty.logs[0]["update/oom_retries"] == 1
    assert relative_difference(faulty.gradients[0], untouched.gradients[0]) <= 1e-5
