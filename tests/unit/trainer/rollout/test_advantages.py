"""Groups with equal rewards, whose advantages TRL leaves at the noise of rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from grpo.trainer.rollout.advantages import zero_variance
from tests.stock_trl import make, ours, train

NAN = float("nan")


def of_prompt(prompts: list[str], **kwargs: Any) -> list[float]:
    """Equal within each group, and no number that float32 holds exactly."""
    return [[0.1, 0.7, 1 / 3][len(prompt) % 3] for prompt in prompts]


def of_every_second_prompt(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Tenths, equal within the groups of every second prompt."""
    return [0.9 if len(p) % 2 else (sum(ids) % 7) / 10 for p, ids in zip(prompts, completion_ids, strict=True)]


OPTIONS: dict[str, Any] = {
    "reward_funcs": [of_prompt, of_every_second_prompt],
    "reward_weights": [0.3, 0.1],
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "max_steps": 1,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale_rewards": "none"},
        {"scale_rewards": "batch"},
        {"multi_objective_aggregation": "normalize_then_sum"},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 16},
    ],
    ids=str,
)
def test_advantages_are_trls_and_exactly_zero_without_variance(tmp_path: Path, options: dict[str, Any]) -> None:
    stock = make(GRPOTrainer, tmp_path, **OPTIONS | options)
    train(stock)
    mine = ours(tmp_path, **OPTIONS | options)
    record = train(mine)
    theirs, advantages = (torch.tensor(list(trainer._logs["advantages"])) for trainer in (stock, mine))
    equal = torch.tensor([len(prompt) % 2 == 1 for prompt in mine._logs["prompt"]])
    assert 0 < equal.sum() < len(equal)
    assert theirs[equal].abs().max() > 0, "TRL's noise, for which this is"
    assert (advantages[equal] == 0).all()
    assert torch.equal(advantages[~equal], theirs[~equal])
    assert record.logs[0]["update/rows_skipped"] == equal.sum()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([[0.1], [0.1], [0.1], [0.2]], [True, True, False, False]),
        ([[NAN], [0.7], [NAN], [NAN]], [True, True, True, True]),
        ([[0.1, 1.0], [0.1, 2.0], [0.1, NAN], [0.1, 3.0]], [False, False, True, True]),
        ([[float("inf")], [float("inf")], [0.1 + 0.2], [0.3]], [True, True, False, False]),
    ],
)
def test_equality_is_that_of_the_bits_of_present_rewards(rewards: list[list[float]], expected: list[bool]) -> None:
    given = torch.tensor(rewards, dtype=torch.float64)
    assert zero_variance(given, torch.ones(given.size(1)), 2, "normalize_then_sum").tolist() == expected


def test_a_large_evaluation_has_zero_variance_too(tmp_path: Path) -> None:
    held_out = Dataset.from_dict({"prompt": ["How many ?"] * 64})
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 64, "max_steps": 1}
    trainer = ours(tmp_path, eval_dataset=held_out, reward_funcs=of_prompt, **options)
    trainer.train()
    assert set(trainer._logs["advantages"]) == {0.0}


def test_groups_that_rounding_hides_from_trl_are_counted(tmp_path: Path) -> None:
    def six(completions: list, **columns: Any) -> list[float]:
        return [6.0] * len(completions)

    trainer = ours(tmp_path, reward_funcs=six, reward_weights=[0.2], num_generations=8, max_steps=1)
    trainer.train()
    row = trainer.state.log_history[0]
    assert row["frac_reward_zero_std"] == 0, "or this test shows nothing"
    assert (row["rollout/zero_variance"], row["update/rows_skipped"]) == (1, 16)
