"""Completions that repeat themselves or are gibberish are skipped, counted, and no part of their group."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from grpo.config.options import Rollout
from grpo.trainer.rollout.degenerate import entropies, repetition
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


def test_gibberish_is_found_by_the_entropy_of_the_policy(tmp_path: Path) -> None:
    options = {"rollout_func": rollouts, "temperature": 0.7, "max_steps": 1}
    trainer = ours(tmp_path, **options)
    found = rollouts(["How many ?"] * 16, trainer)
    prompts, ids = found["prompt_ids"], found["completion_ids"]
    masks = [[1] * len(tokens) for tokens in ids]
    masks[3] = [0, *masks[3][1:]]
    expected = []
    for prompt, tokens, mask in zip(prompts, ids, masks, strict=True):
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / 0.7
        each = torch.distributions.Categorical(logits=logits).entropy()
        expected.append(float((each * torch.tensor(mask)).sum() / max(1, sum(mask))))
    assert entropies(trainer, prompts, ids, masks) == pytest.approx(expected, abs=1e-4)
    middle = sorted(expected)[8]
    trainer = ours(tmp_path, rollout=Rollout(max_entropy=middle), **options)
    (row,) = train(trainer).logs
    skipped = [value != value for value in trainer._logs["rewards"]["reward"]]
    assert row["rollout/gibberish"] == sum(skipped) / 16
    assert 0 < sum(skipped) < 16


def test_entropies_of_images_are_refused(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["How many ?"] * 8, "images": [[]] * 8})
    with pytest.raises(ValueError, match=r"rollout\.max_entropy: works with text alone"):
        ours(tmp_path, rollout=Rollout(max_entropy=1.0), train_dataset=data)
