"""Losses that TRL lacks, beside their derivations and, where they coincide, beside TRL's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from grpo import losses
from grpo.losses import dppo
from grpo.options import Update
from tests.derived_losses import DPPO, MAXRL, ByEquation11, ByTheorem2
from tests.stock_trl import (
    KL_FOUR_SLICES,
    ROUNDING,
    SMALL,
    ScriptedEngine,
    doubled,
    make,
    ours,
    relative_difference,
    train,
)

KL = {"beta": 0.04, "num_iterations": 2, "max_steps": 4}


def test_maxrl_is_the_estimator_of_its_theorem(tmp_path: Path) -> None:
    theirs = train(make(ByTheorem2, tmp_path, **MAXRL))
    mine = train(ours(tmp_path, **MAXRL), start_from=theirs.weights)
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) <= 1e-5


def test_maxrl_is_trls_dr_grpo_where_mean_rewards_are_1(tmp_path: Path) -> None:
    def mean_of_1(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [(2.0, 0.0, 1.5, 0.5)[index % 4] for index in range(len(completion_ids))]

    options = KL | {"scale_rewards": "none", "reward_funcs": mean_of_1}
    theirs = train(doubled(make(GRPOTrainer, tmp_path, **options | {"loss_type": "dr_grpo"})))
    mine = train(doubled(ours(tmp_path, **options | {"loss_type": "maxrl"})), start_from=theirs.weights)
    assert_alike(mine, theirs)


def test_advantages_of_maxrl_are_logged_as_they_are_used(tmp_path: Path) -> None:
    trainer = ours(tmp_path, max_steps=1, **MAXRL)
    train(trainer)
    rewards = torch.tensor(list(trainer._logs["rewards"]["correct"])).view(-1, 4)
    expected = torch.nan_to_num(rewards / rewards.mean(1, keepdim=True) - 1)
    assert expected.abs().sum() > 0
    assert torch.allclose(torch.tensor(list(trainer._logs["advantages"])).view(-1, 4), expected)


def test_maxrl_refuses_groups_whose_mean_reward_is_negative(tmp_path: Path) -> None:
    trainer = ours(
        tmp_path, loss_type="maxrl", scale_rewards="none", reward_funcs=lambda prompts, **_: [-1.0] * len(prompts)
    )
    with pytest.raises(ValueError, match="it needs rewards of 0 or more"):
        train(trainer)


@pytest.mark.parametrize("engine", [False, True], ids=["transformers", "vLLM"])
def test_dppo_masks_tokens_whose_probability_moved_too_far(tmp_path: Path, engine: bool) -> None:
    trainers = doubled(make(ByEquation11, tmp_path, **DPPO)), doubled(ours(tmp_path, **DPPO))
    for trainer in trainers if engine else ():
        ScriptedEngine(trainer, noise=0.1)
    theirs = train(trainers[0])
    mine = train(trainers[1], start_from=theirs.weights)
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) <= 1e-5
    assert mine.logs[-1]["clip_ratio/low_mean"] > 0
    assert mine.logs[-1]["clip_ratio/high_mean"] > 0


def test_dppo_is_trls_dapo_where_neither_masks_nor_clips(tmp_path: Path) -> None:
    options = KL | {"epsilon": 1e3}
    theirs = train(doubled(make(GRPOTrainer, tmp_path, **options | {"loss_type": "dapo"})))
    mine = train(doubled(ours(tmp_path, **options | {"loss_type": "dppo"})), start_from=theirs.weights)
    assert_alike(mine, theirs)


def assert_alike(mine: Any, theirs: Any) -> None:
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) <= 1e-5
    for row, expected in zip(mine.logs, theirs.logs, strict=True):
        for name in ("loss", "kl", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_max"):
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=ROUNDING), name


@pytest.mark.parametrize("loss_type", losses.NAMES)
@pytest.mark.parametrize("update", [Update(1), Update(10_000, skip_zero_advantage=False)], ids=["alone", "at once"])
def test_micro_batches_do_not_change_the_gradient(tmp_path: Path, loss_type: str, update: Update) -> None:
    options = KL_FOUR_SLICES | {"loss_type": loss_type, "scale_rewards": "none", "mask_truncated_completions": True}
    one = train(doubled(ours(tmp_path, SMALL, **options)))
    other = train(doubled(ours(tmp_path, update, **options)), start_from=one.weights)
    for gradient, expected in zip(other.gradients, one.gradients, strict=True):
        assert relative_difference(gradient, expected) <= 1e-5


@pytest.mark.parametrize("loss_type", losses.NAMES)
def test_an_evaluation_computes_the_loss(tmp_path: Path, loss_type: str) -> None:
    trainer = ours(tmp_path, loss_type=loss_type, scale_rewards="none", per_device_eval_batch_size=8)
    assert trainer.evaluate(trainer.train_dataset.select(range(8)))["eval_loss"] == pytest.approx(0.0, abs=1.0)


def test_options_of_trls_losses_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1: train\.loss_type=dppo needs train\.entropy_coef=0\.0"):
        ours(tmp_path, loss_type="dppo", entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"scale_rewards=group: .* needs train\.scale_rewards=none"):
        ours(tmp_path, loss_type="maxrl")


@pytest.mark.parametrize("mean", [None, "tokenz"])
def test_a_file_that_is_no_loss_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mean: str | None) -> None:
    monkeypatch.setattr(dppo, "MEAN", mean)
    with pytest.raises(ValueError, match=f"dppo.py has MEAN={mean!r}; it needs a function per_token and MEAN="):
        ours(tmp_path, loss_type="dppo")


def test_a_loss_may_log_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    per_token = dppo.per_token
    monkeypatch.setattr(dppo, "per_token", lambda *given: (per_token(*given)[0], {}))
    (row,) = train(ours(tmp_path, loss_type="dppo", max_steps=1)).logs
    assert "clip_ratio/low_min" not in row
    assert row["update/entropy"] > 0
