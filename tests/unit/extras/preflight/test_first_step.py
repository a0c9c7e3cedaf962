"""The first step at a line of learning rates, and the learning rate that follows from it."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from peft import LoraConfig

from grpo.extras.preflight import first_step as module
from grpo.extras.preflight.first_step import (
    FirstStep,
    Step,
    along,
    gain_of,
    kl_of,
    read_step,
    try_first_step,
    why_not_tried,
    write_step,
)
from grpo.extras.preflight.learning_rate import rates_of, suggested, suggestion, too_far, too_little
from grpo.options import Update
from tests.stock_trl import Record, ours, train

KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "8 bit": {"optim": "adamw_8bit"},
    "SGD": {"optim": "sgd", "learning_rate": 0.1},
    "LoRA": {"peft_config": LoraConfig(target_modules="all-linear"), "learning_rate": 3e-2},
    "four slices": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
}
STEP = Step(1e-3, 1e-3, 0.2)


def tried(folder: Path, update: Update | None = None, **options: Any) -> tuple[Any, FirstStep]:
    trainer = ours(folder, update, **{"max_steps": 2, "save_strategy": "no", **options})
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    first_step = try_first_step(trainer)
    after = trainer.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items()), "no step is kept"
    return trainer, first_step


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_step_moves_in_proportion_to_its_rate(kind: str, tmp_path: Path) -> None:
    _, first_step = tried(tmp_path, **KINDS[kind])
    small = [step for step in first_step.steps if step.kl is not None and 1e-6 < step.kl < 1e-4]
    assert len(small) >= 2
    for step, larger in pairwise(small):
        ratio = larger.rate / step.rate
        assert (larger.kl or 0.0) / (step.kl or 1.0) == pytest.approx(ratio**2, rel=0.25)
        assert larger.gain / step.gain == pytest.approx(ratio, rel=0.25)
    assert all(step.gain > 0 for step in small), "the gradient raises what was better than its group"
    last = first_step.steps[-1].kl
    assert last is None or last > 0.3


@pytest.mark.parametrize("kind", ["AdamW", "8 bit", "LoRA"])
def test_the_step_is_the_one_that_the_run_takes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed: list[dict[str, torch.Tensor]] = []
    scored = module.log_probs

    def log_probs(trainer: Any, batch: Any) -> torch.Tensor:
        changed.append({name: weight.clone() for name, weight in trainer.model.state_dict().items()})
        return scored(trainer, batch)

    monkeypatch.setattr(module, "log_probs", log_probs)
    options = KINDS[kind]
    trainer, first_step = tried(tmp_path / "tried", **options)
    rate = trainer.args.learning_rate
    assert first_step.at(rate) is not None
    run = ours(tmp_path / "run", None, max_steps=2, save_strategy="no", lr_scheduler_type="constant", **options)
    run.add_callback(SkipsFirst(run))
    train(run)
    after = run.model.state_dict()
    assert any(all(torch.equal(weight, state[name]) for name, weight in after.items()) for state in changed)


class SkipsFirst(Record):
    """Drops the gradient of the first step, as trying does, so that the second step is the optimizer's first."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not state.global_step:
            self.trainer.step_update.drop_gradients(self.trainer.model)


def test_gradients_on_the_host_give_the_same_steps(tmp_path: Path) -> None:
    _, plain = tried(tmp_path / "plain")
    _, offloaded = tried(tmp_path / "offloaded", Update(gradients_on_host=True))
    assert offloaded.steps == plain.steps


def test_without_a_gradient_there_is_a_reason(tmp_path: Path) -> None:
    _, first_step = tried(tmp_path, reward_funcs=[lambda completions, **columns: [1.0] * len(completions)])
    assert first_step.steps == []
    assert first_step.reason == "no completion of a batch has a gradient"


def test_the_divergence_of_a_step_is_exact_by_enumeration() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    times = (10 * old).int()  # each token as often as the old policy samples it
    change = torch.repeat_interleave((new / old).log(), times)[None]
    batch = {"completion_mask": torch.ones_like(change), "advantages": torch.ones(1)}
    assert kl_of(batch, change) == pytest.approx(float((old * (old / new).log()).sum()), abs=1e-6)
    assert kl_of(batch, change + 1000) is None


def test_a_gain_is_of_better_less_that_of_worse_completions() -> None:
    batch = {"advantages": torch.tensor([3.0, 1.0, 0.0, -2.0]), "completion_mask": torch.ones(4, 1)}
    change = torch.tensor([[1.0], [5.0], [7.0], [-0.5]])
    assert gain_of(batch, change) == pytest.approx((3 * 1 + 1 * 5) / 4 + 0.5)
    assert gain_of({**batch, "advantages": torch.zeros(4)}, change) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_line_goes_from_little_to_much_for_any_optimizer(scale: float) -> None:
    tried_rates: list[float] = []

    def at(rate: float) -> Step:
        tried_rates.append(rate)
        kl = (rate * scale) ** 2
        return Step(rate, kl if kl < 1e12 else None, rate)

    steps = along(at, 0.1 / scale)
    rates = [step.rate for step in steps]
    assert rates == sorted(rates)
    assert 0.1 / scale in rates
    assert 1e-7 < (steps[0].kl or 0.0) < 1e-5
    assert steps[-1].kl is None or steps[-1].kl >= 1
    assert len(tried_rates) < 16


def test_a_policy_that_never_changes_has_no_line() -> None:
    assert along(lambda rate: Step(rate, 0.0, 0.0), 1e-3) == []
    assert along(lambda rate: Step(rate, None, 0.0), 1e-3) == []


def test_steps_are_read_back_for_the_same_settings(tmp_path: Path, composed: Callable[..., DictConfig]) -> None:
    config, first_step = composed("train.seed=1"), FirstStep([STEP, Step(0.1, None, 0.0)], 0.01)
    write_step(tmp_path, config, first_step)
    assert read_step(tmp_path, composed("train.seed=1", "preflight.problems=9")) == first_step
    assert read_step(tmp_path, composed("train.seed=2")) is None
    assert read_step(tmp_path / "none", config) is None
    (tmp_path / "first_step.json").write_text('{"key": ')
    assert read_step(tmp_path, config) is None, "torn"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), ""),
        (("launch.processes=2", "shard=fsdp2"), "divided over processes (FSDP2)"),
        (("launch.processes=2",), ""),
        (("train.optim=lomo",), "train.optim=lomo changes weights during the backward pass"),
    ],
)
def test_a_step_that_one_process_cannot_try_has_a_reason(
    overrides: tuple[str, ...], reason: str, composed: Callable[..., DictConfig]
) -> None:
    assert why_not_tried(composed(*overrides)).endswith(reason)
    assert bool(why_not_tried(composed(*overrides))) is bool(reason)


def test_a_rate_is_too_high_or_too_low_for_a_run() -> None:
    assert too_far(Step(1.0, None, 5.0))
    assert too_far(Step(1.0, 2.0, 5.0))
    assert not too_far(STEP)
    assert too_little(STEP, 1)
    assert not too_little(STEP, 100)
    assert not too_little(Step(1.0, None, 0.0), 1), "it is too high"


def test_a_longer_run_is_suggested_a_lower_rate() -> None:
    line = [Step(10**power, 10 ** (2 * power + 2), 10 ** (power + 2)) for power in range(-8, 1)]
    rates = [suggested(line, count) for count in (10, 100, 1000, 10_000)]
    assert all(rate is not None for rate in rates)
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert rates[0] != rates[-1]
    assert suggested([], 10) is None


def test_a_suggested_rate_is_where_a_limit_is_reached() -> None:
    rates = (1e-5, 1e-4, 1e-3, 1e-2)
    by_gain = [Step(rate, (10 * rate) ** 2, 1000 * rate) for rate in rates]
    assert suggested(by_gain, 20) == pytest.approx(13 / 20 / 1000)
    by_kl = [Step(rate, (100 * rate) ** 2, rate) for rate in rates]
    assert suggested(by_kl, 20) == pytest.approx(math.sqrt(0.02) / 100)
    destroyed = [*by_gain[:2], Step(1e-3, None, 0.0)]
    assert suggested(destroyed, 20) == 1e-4, "the last rate before"


def test_a_rate_far_from_the_suggested_one_is_replaced() -> None:
    first_step = FirstStep([Step(rate, (100 * rate) ** 2, 1000 * rate) for rate in (1e-5, 1e-4, 1e-3, 1e-2)])
    rate = suggested(first_step.steps, 20)
    assert rate
    assert suggestion(first_step, rate * 3, 20) == []
    (row,) = suggestion(first_step, rate / 1000, 20)
    assert row["overrides"] == [f"train.learning_rate={rate:.1g}"]
    assert rates_of(first_step, 1e-4, 20)["suggested"] == rate
