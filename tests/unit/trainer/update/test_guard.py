"""Steps whose gradient is not finite."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainerCallback
from trl import GRPOTrainer

from grpo.trainer import ExactGRPOTrainer, Update
from tests.stock_trl import ours, train


class States(TrainerCallback):
    """Weights and the optimizer's state before and after each step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.before, self.after = trainer, [], []

    def _copy(self) -> list[torch.Tensor]:
        optimizer = self.trainer.optimizer.state_dict()["state"]
        tensors = [value for state in optimizer.values() for value in state.values() if torch.is_tensor(value)]
        return [tensor.clone() for tensor in (*self.trainer.model.state_dict().values(), *tensors)]

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before.append(self._copy())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.after.append(self._copy())

    def same(self, step: int) -> bool:
        pairs = zip(self.before[step], self.after[step], strict=True)
        return all(torch.equal(old, new) for old, new in pairs)


def spoil(trainer: ExactGRPOTrainer, what: str, active: Callable[[], bool]) -> list[str]:
    """Make something infinite or not a number while `active`; return the texts of the rows, where that is one row."""
    spoilt: list[str] = []
    if what == "reward":
        reward = trainer.reward_funcs[0]

        def infinite(**kwargs: Any) -> list[float]:
            return [math.inf if active() and row == 3 else value for row, value in enumerate(reward(**kwargs))]

        trainer.reward_funcs[0] = infinite
        trainer.scale_rewards = "none"
    elif what == "loss":
        compute = trainer._compute_loss
        trainer._compute_loss = lambda *args: compute(*args) * (math.nan if active() else 1.0)
    elif what == "logps":
        compute_logps = GRPOTrainer._get_per_token_logps_and_entropies

        def one_row(model: Any, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            logps, entropies, aux = compute_logps(trainer, model, ids, *args, **kwargs)
            if active() and not spoilt:
                logps = torch.cat([logps[:1] * math.nan, logps[1:]])
                spoilt.append(trainer.processing_class.decode(ids[0]))
            trainer._scores = (logps.detach(), entropies.detach())
            return logps, entropies, aux

        trainer._get_per_token_logps_and_entropies = one_row
    else:
        weight = trainer.model.model.layers[1].mlp.up_proj.weight
        weight.register_hook(lambda grad: grad.fill_(math.inf) if active() else grad)
    return spoilt


@pytest.mark.parametrize("optimizer", ["adamw_torch", "adamw_8bit"])
@pytest.mark.parametrize("what", ["reward", "loss", "logps", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path, what: str, optimizer: str) -> None:
    trainer = ours(tmp_path, max_steps=3, weight_decay=0.1, optim=optimizer, max_grad_norm=1.0)
    spoilt = spoil(trainer, what, active=lambda: trainer.state.global_step == 1)
    states = States(trainer)
    trainer.add_callback(states)
    record = train(trainer)
    assert [states.same(step) for step in range(3)] == [False, True, False]
    assert [row["update/steps_skipped"] for row in record.logs] == [0, 1, 0]
    assert all(bool(value.isfinite().all()) for value in trainer.model.state_dict().values())
    rows = [json.loads(line) for line in (tmp_path / "skipped_rows.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {2}
    assert {"prompt", "completion", "advantage", "loss_tokens"} <= set(rows[0])
    if what == "logps":
        (row,) = rows
        assert row["prompt"] + row["completion"] == spoilt[0].replace("<pad>", "")
    assert trainer.stop_reason is None


def test_a_reward_that_is_not_a_number_is_left_out_as_in_trl(tmp_path: Path) -> None:
    values = [math.nan, 1.0, 0.0, None]
    trainer = ours(tmp_path, reward_funcs=lambda prompts, **kwargs: values * (len(prompts) // 4))
    record = train(trainer)
    assert all(row["update/rows_skipped"] >= 8 and math.isfinite(row["grad_norm"]) for row in record.logs)


def test_too_many_skipped_steps_stop_the_run_with_advice(tmp_path: Path) -> None:
    trainer = ours(
        tmp_path, Update(100, max_skipped_steps=2), max_steps=9, save_strategy="steps", save_steps=100, beta=0.04
    )
    spoil(trainer, "loss", active=lambda: trainer.state.global_step > 0)
    record = train(trainer)
    assert trainer.state.global_step == 3
    assert trainer.stop_reason is not None
    assert "step 3 is not finite, number 2 in a row" in trainer.stop_reason
    for word in ("skipped_rows.jsonl", "learning_rate", "max_grad_norm", "adam_beta2", "data"):
        assert word in trainer.stop_reason
    assert (tmp_path / "checkpoint-3" / "trainer_state.json").exists()
    assert [row["update/steps_skipped"] for row in record.logs] == [0, 1, 1]


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
def test_a_loss_scale_that_is_too_high_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_grad_norm: float
) -> None:
    """In float16 the scaler halves its scale at each step that overflows, until it fits, clipped or not."""
    trainer = ours(tmp_path, Update(100, max_skipped_steps=2), max_steps=8, max_grad_norm=max_grad_norm)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    trainer.accelerator.native_amp = True  # which accelerate has on GPUs only
    monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
    record = train(trainer)
    skipped = [row["update/steps_skipped"] for row in record.logs]
    assert skipped[:3] == [1, 1, 1]
    assert 0 in skipped
    assert trainer.stop_reason is None


def test_skipped_steps_that_are_not_in_a_row_do_not_stop_the_run(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(100, max_skipped_steps=2), max_steps=6)
    spoil(trainer, "gradient", active=lambda: trainer.state.global_step % 2 == 1)
    record = train(trainer)
    assert trainer.stop_reason is None
    assert [row["update/steps_skipped"] for row in record.logs] == [0, 1, 0, 1, 0, 1]
