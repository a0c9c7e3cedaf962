"""Rounds of generation until every group teaches something, beside stock TRL on the groups that are kept."""

import math
from itertools import count
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset
from trl import GRPOTrainer

from grpo.options import Rollout
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.problem_order import ProblemOrder
from tests.stock_trl import (
    KL_FOUR_SLICES,
    ROUNDING,
    doubled,
    generated_at_once,
    make,
    note_kept,
    ours,
    relative_difference,
    reward,
    train,
)

ON = Rollout(dynamic_sampling=True)


def recorded(directory: Path, rollout: Rollout = ON, **options: Any) -> tuple[ExactGRPOTrainer, list[list[Completion]]]:
    trainer = ours(directory, rollout=rollout, **options)
    return trainer, note_kept(trainer)


@pytest.mark.parametrize(
    "options", [{"loss_type": "dapo", "max_steps": 4}, KL_FOUR_SLICES], ids=["dapo", "KL, two iterations, slices"]
)
def test_the_gradient_is_stock_trls_on_the_groups_that_are_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer, kept = recorded(tmp_path, **options)
    mine = train(doubled(trainer))
    stock = doubled(make(GRPOTrainer, tmp_path, **options, **generated_at_once(trainer, kept)))
    theirs = train(stock, start_from=mine.weights)
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) < 1e-5
    for row, expected in zip(mine.logs, theirs.logs, strict=True):
        for name in ("loss", "reward", "reward_std", "completions/mean_length", "frac_reward_zero_std", "num_tokens"):
            assert row.get(name) == pytest.approx(expected.get(name), abs=ROUNDING), name


def test_zero_variance_groups_make_room_for_further_problems(tmp_path: Path) -> None:
    trainer, kept = recorded(tmp_path, max_steps=3)
    logs = train(trainer).logs
    problems = [one.problem for generation in kept for one in generation[::4]]
    taken = ProblemOrder(48, 42, shuffle=True).take(trainer.rollouts.source.order.taken)
    teaching = [index for index in taken if len(trainer.train_dataset[index]["prompt"]) % 2 == 0]
    assert [index for index in teaching if index in problems] == problems
    assert [row["frac_reward_zero_std"] for row in logs] == [0.0] * 3
    for row, generation in zip(logs, kept, strict=True):
        assert row["rollout/groups_kept"] == len(generation) / 4
        assert row["rollout/groups_generated"] > row["rollout/groups_kept"]
        assert 2 <= row["rollout/rounds"] <= 5
        assert 0 < row["rollout/informative_share"] < 1
        assert row["rollout/reward"] != row["reward"]
    assert logs[-1]["rollout/problems"] == sum(row["rollout/groups_generated"] for row in logs)


def test_zero_variance_groups_fill_the_batch_of_the_last_round(tmp_path: Path) -> None:
    rollout = Rollout(dynamic_sampling=True, max_rounds=2)
    trainer, kept = recorded(tmp_path, rollout, max_steps=1, reward_funcs=lambda prompts, **_: [1.0] * len(prompts))
    (row,) = train(trainer).logs
    assert (row["rollout/rounds"], row["rollout/groups_generated"], row["rollout/groups_kept"]) == (2, 8, 0)
    assert [one.problem for one in kept[0][::4]] == ProblemOrder(48, 42, shuffle=True).take(4)
    assert row["frac_reward_zero_std"] == 1.0


def test_without_a_number_of_steps_training_ends_with_the_data(tmp_path: Path) -> None:
    trainer, kept = recorded(tmp_path, max_steps=-1, num_train_epochs=2)
    logs = train(trainer).logs
    assert len(logs) == len(kept) < 2 * 48 / 4
    assert 2 * 48 <= trainer.rollouts.source.order.taken < 2 * 48 + 5 * 4
    assert trainer.state.global_step == trainer.state.max_steps == len(logs)


def test_columns_that_rewards_log_stay_beside_their_completions(tmp_path: Path) -> None:
    def logging(prompts: list[str], completion_ids: list[list[int]], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("length", [len(ids) for ids in completion_ids])
        return reward(prompts, completion_ids)

    trainer, kept = recorded(tmp_path, max_steps=2, reward_funcs=logging)
    train(trainer)
    assert list(trainer._logs["extra"]["length"]) == [len(one.ids) for one in kept[-1]]


def test_a_column_of_some_rounds_stays_beside_its_completions(tmp_path: Path) -> None:
    rounds = count()

    def logging(prompts: list[str], completion_ids: list[list[int]], log_extra: Any, **kwargs: Any) -> list[float]:
        if next(rounds) % 2:
            log_extra("length", [len(ids) for ids in completion_ids])
        return reward(prompts, completion_ids)

    trainer, kept = recorded(tmp_path, max_steps=3, reward_funcs=logging)
    train(trainer)
    column = list(trainer._logs["extra"]["length"])
    assert {value == len(one.ids) for value, one in zip(column, kept[-1], strict=True) if value is not None} == {True}
    assert None in column


@pytest.mark.parametrize("logs_at", [0, 1])
def test_a_column_of_one_step_is_empty_in_the_others(tmp_path: Path, logs_at: int) -> None:
    def logging(prompts: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        if kwargs["trainer_state"].global_step == logs_at:
            kwargs["log_extra"]("length", [len(ids) for ids in completion_ids])
        return reward(prompts, completion_ids)

    trainer = ours(tmp_path, max_steps=logs_at + 2, reward_funcs=logging, log_completions=True)
    train(trainer)
    for step in range(logs_at, logs_at + 2):
        table = pandas.read_parquet(tmp_path / "completions" / f"completions_{step + 1:05d}.parquet")
        assert table["length"].isna().all() == (step != logs_at)


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_logged_column_takes_the_place_of_another(tmp_path: Path, dynamic: bool) -> None:
    """Rewards log columns that the table, the data, a reward or another reward has."""

    def first(prompts: list[str], completion_ids: list[list[int]], log_extra: Any, **kwargs: Any) -> list[float]:
        for column in ("prompt", "step", "advantage", "first", "level", "length"):
            log_extra(column, [f"first's {column}"] * len(prompts))
        return reward(prompts, completion_ids)

    def second(prompts: list[str], log_extra: Any, **kwargs: Any) -> list[float]:
        log_extra("length", ["second's"] * len(prompts))
        return [0.0] * len(prompts)

    data = Dataset.from_dict({"prompt": ["How many ?", "1 2", "1", "2"], "level": [1, 2, 3, 4]})
    options = {"reward_funcs": [first, second], "log_completions": True, "keep_columns": True, "train_dataset": data}
    trainer = ours(tmp_path, max_steps=1, rollout=Rollout(dynamic_sampling=dynamic), **options)
    train(trainer)
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert set(table["prompt"]) <= set(data["prompt"])
    assert set(table["step"]) == {1}
    assert set(table["level"]) <= {1, 2, 3, 4}
    assert table["first"].dtype == table["advantage"].dtype == float
    for column in ("prompt", "step", "advantage", "first", "level"):
        assert set(table[f"{column}_"]) == {f"first's {column}"}
    assert {*table["length"], *table["length_"]} == {"first's length", "second's"}


def test_an_evaluation_generates_once(tmp_path: Path) -> None:
    problems = Dataset.from_dict({"prompt": ["How many ?", "1 2"]})
    trainer, kept = recorded(tmp_path, max_steps=1, eval_dataset=problems, per_device_eval_batch_size=8)
    trainer.evaluate()
    assert not kept


def test_the_order_is_that_of_trl_epoch_by_epoch(tmp_path: Path) -> None:
    sampler = ours(tmp_path, max_steps=-1)._get_train_sampler()
    theirs = [index for _ in range(3) for index in list(sampler)[::4]]
    order = ProblemOrder(48, 42, shuffle=True)
    assert order.take(50) + order.take(3 * 48 - 50) == theirs
    assert ProblemOrder(3, 42, shuffle=False).take(5) == [0, 1, 2, 0, 1]


def test_problems_solved_or_out_of_reach_are_taken_less_often() -> None:
    order = ProblemOrder(1000, 0, shuffle=True, prioritize=True)
    order.correct = {problem: (0.0, 0.5, 1.0)[problem % 3] for problem in range(999)}  # the last one is unknown
    taken = order.take(4000)
    kinds = [sum(problem % 3 == kind for problem in taken) / len(taken) for kind in range(3)]
    assert kinds == pytest.approx([1 / 6, 4 / 6, 1 / 6], abs=0.03)
    again = ProblemOrder(1000, 0, shuffle=True, prioritize=True)
    again.correct, again.taken = order.correct, order.taken
    assert again.take(50) == order.take(50)
    assert order.counts() == {"solved": 333, "learnable": 333, "out_of_reach": 333}


def test_prioritized_problems_fill_the_batch_in_one_round(tmp_path: Path) -> None:
    trainer, kept = recorded(tmp_path, Rollout(prioritize=True), max_steps=20)
    rows = train(trainer).logs
    assert {row["rollout/rounds"] for row in rows} == {1}
    assert rows[0]["rollout/problems"] == 4 < rows[-1]["rollout/problems"]
    seen = {one.problem for generation in kept for one in generation}
    assert sum(rows[-1][f"rollout/problems_{name}"] for name in ("solved", "learnable", "out_of_reach")) == len(seen)
    last = {one.problem: [] for one in kept[-1]}
    for one in kept[-1]:
        last[one.problem].append(min(1.0, one.rewards[0]))
    for problem, rewards in last.items():
        assert trainer.rollouts.source.order.correct[problem] == pytest.approx(sum(rewards) / len(rewards))


def test_failed_rewards_do_not_put_a_problem_out_of_reach() -> None:
    order = ProblemOrder(2, 0, shuffle=False, prioritize=True)
    sampling = DynamicSampling(Rollout(prioritize=True), order, 1, {"correct": 1.0}, "correct")
    rewards = [[1.0, math.nan, math.nan, 0.0], [math.nan] * 4]

    def groups(number: int) -> list[tuple[list[Completion], bool]]:
        return [
            ([Completion(problem, [1], [2], None, None, "?", "!", [reward], {}) for reward in of_group], False)
            for problem, of_group in enumerate(rewards)
        ]

    sampling.fill(2, groups)
    assert order.correct == {0: 0.5}


def test_there_is_at_least_one_round() -> None:
    with pytest.raises(ValueError, match="max_rounds=0: at least 1"):
        Rollout(max_rounds=0)
