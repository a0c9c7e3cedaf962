"""Completions that repeat themselves are skipped, counted, and no part of their group."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from grpo.options import Rollout
from grpo.trainer.rollout.degenerate import Degenerate, repetition
from tests.stock_trl import make, ours, relative_difference, reward, rollouts, train


def repeating(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The fixed completions; every fifth says the same token twelve times."""
    found = rollouts(prompts, trainer)
    for row in range(0, len(prompts), 5):
        found["completion_ids"][row] = [7 + row] * 12
    return found


def none_for_repeating(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    given = reward(prompts, completion_ids)
    return [
        None if len({*ids}) == 1 and len(ids) == 12 else one for ids, one in zip(completion_ids, given, strict=True)
    ]


@pytest.mark.parametrize("options", [{}, {"beta": 0.04, "num_iterations": 2, "max_steps": 4}], ids=str)
def test_repetitive_completions_are_skipped_as_without_reward(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = train(make(GRPOTrainer, tmp_path, rollout_func=repeating, reward_funcs=none_for_repeating, **options))
    trainer = ours(tmp_path, rollout_func=repeating, rollout=Rollout(max_repetition=0.5), **options)
    mine = train(trainer, start_from=theirs.weights)
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) <= 1e-5
    assert mine.logs[0]["rollout/repetitive"] == 4 / 16
    for place in (0, 5, 10, 15):
        assert trainer._logs["advantages"][place] == 0
        assert trainer._logs["rewards"]["reward"][place] != trainer._logs["rewards"]["reward"][place]


def test_repetition_is_the_fraction_of_repeated_ngrams() -> None:
    assert repetition([1, 2, 3]) == 0
    assert repetition(list(range(50))) == 0
    assert repetition([1] * 13) == pytest.approx(9 / 10)
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


def test_tokens_of_tools_are_no_repetition() -> None:
    logged: dict[str, list[float]] = {"rollout/repetitive": []}
    rewards = torch.ones(2, 1)
    accelerator = SimpleNamespace(gather=lambda values: values)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _pending_metrics=logged,
    )
    Degenerate(0.5).scored(trainer, [[1] * 13, [1] * 13], [[1] * 13, [1] * 3 + [0] * 10], rewards)
    assert rewards.isnan().flatten().tolist() == [True, False]
    assert logged == {"rollout/repetitive": [1.0, 0.0]}
