"""The problems of several tasks in one order: by weight, from the seed, and the same again after a resume."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from grpo.generation.transformers.continuous_batching import ContinuousBatching
from grpo.options import Mixture
from grpo.trainer.rollout.completer import Completer
from grpo.trainer.rollout.mixed_order import MixedOrder
from grpo.trainer.rollout.problem_order import ProblemOrder
from tests.stock_trl import ours, reward, train

TASKS = ["a"] * 30 + ["b"] * 7 + ["c"] * 11


def order_of(weights: dict[str, float], prioritize: bool = False) -> MixedOrder:
    return MixedOrder(TASKS, weights, 42, shuffle=True, prioritize=prioritize)


@given(st.tuples(*[st.sampled_from([0.0, 0.3, 1.0, 2.0, 7.5])] * 2), st.integers(1, 60))
def test_of_any_successive_problems_each_task_has_its_portion(weights: tuple[float, float], number: int) -> None:
    order = order_of({"a": weights[0], "b": weights[1], "c": 1.0})
    order.take(13)
    found = Counter(TASKS[problem] for problem in order.take(number))
    for name, weight in zip("abc", (*weights, 1.0), strict=True):
        assert abs(found[name] - number * weight / (sum(weights) + 1)) < 2


def test_each_task_has_the_order_that_it_has_alone() -> None:
    taken = order_of({"a": 1, "b": 2, "c": 0}).take(90)
    of_b = [problem - 30 for problem in taken if TASKS[problem] == "b"]
    assert of_b == ProblemOrder(7, 42, shuffle=True).take(60)
    assert Counter(TASKS[problem] for problem in taken) == {"a": 30, "b": 60}
    assert [TASKS[problem] for problem in taken[:6]] == ["b", "a", "b"] * 2


def test_a_resumed_order_continues_with_the_same_problems() -> None:
    order, again = (order_of({"a": 3, "b": 1, "c": 1.5}, prioritize=True) for _ in range(2))
    for problem in order.take(50):
        order.note(problem, (problem % 3) / 2)
    again.load_state_dict(order.state_dict())
    assert again.counts() == order.counts()
    assert again.taken == order.taken >= 50
    assert again.take(40) == order.take(40)


def test_problems_are_prioritized_within_each_task_alone() -> None:
    order, alone = order_of({"a": 1, "b": 1}, prioritize=True), ProblemOrder(30, 42, shuffle=True, prioritize=True)
    for problem in range(1, 30):
        order.note(problem, 0.0)  # all of a but one are out of reach
        alone.note(problem, 0.0)
    taken = order.take(200)
    of_a = [problem for problem in taken if TASKS[problem] == "a"]
    assert of_a == alone.take(100)
    assert of_a.count(0) > 2 * len(of_a) / 30


def test_the_state_of_an_earlier_version_continues() -> None:
    """Its moving average of the groups of each task has no effect."""
    order, again = (order_of({"a": 3, "b": 1, "c": 1.5}, prioritize=True) for _ in range(2))
    order.take(50)
    again.load_state_dict(order.state_dict() | {"varied": {"a": 0.2, "b": 1.0, "c": 0.0}})
    assert again.take(40) == order.take(40)


def mixed(folder: Path, weight: float = 1, **options: Any) -> Any:
    """A trainer with two tasks of which the second has short completions, and a reward for each."""

    def second(completions: list, task: list[str], **columns: Any) -> list[float | None]:
        return [0.5 * (len(text) % 3) if of == "short" else None for text, of in zip(completions, task, strict=True)]

    rows = [{"prompt": f"a b c {number}", "task": "long" if number % 4 else "short"} for number in range(40)]
    mixture = Mixture({"long": weight, "short": 1}, {"long": 24, "short": 3}, {"long": "reward", "short": "second"})
    rewarded = {"reward_funcs": [reward, second], "train_dataset": Dataset.from_list(rows)}
    return ours(folder, mixture=mixture, **rewarded, **options)


def test_a_task_has_completions_within_its_own_limit(tmp_path: Path) -> None:
    trainer = mixed(tmp_path, max_steps=2, rollout_func=None, log_completions=True)
    asked: list[list[int]] = []
    complete = trainer.rollouts.completer.complete

    def noting(*given: Any) -> Any:
        found = complete(*given)
        asked.append([len(ids) for ids in found[0]])
        return found

    trainer.rollouts.completer.complete = noting
    train(trainer)
    for lengths in asked:
        tasks = {"long": lengths[:4] + lengths[8:12], "short": lengths[4:8] + lengths[12:]}
        assert max(tasks["short"]) == 3 < max(tasks["long"]) <= 24


def test_a_mixture_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = mixed(tmp_path / "whole", 2, max_steps=4, save_strategy="steps", save_steps=1, shuffle_dataset=True)
    logs = train(whole).logs
    again = mixed(tmp_path / "again", 2, max_steps=4, shuffle_dataset=True)
    again.generations = 1  # of the fixed rollouts
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight), name
    assert again.state.log_history[-2]["reward"] == pytest.approx(logs[-1]["reward"], abs=0)


def test_a_server_generates_up_to_the_limit_of_all_processes() -> None:
    """Rank 0 asks for the completions of all: its own tasks may be the short ones."""
    completer, asked = Completer(ContinuousBatching(None), limits={"long": 24, "short": 3}), list[int]()
    engine = SimpleNamespace(max_completion_length=40)
    accelerator = SimpleNamespace(device="cpu", gather=lambda own: torch.tensor([int(own), 24]))
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_mode="server",
        vllm_generation=engine,
        accelerator=accelerator,
        max_completion_length=24,
        processing_class=None,
        _video_pad_token_id=None,
    )
    completer._begun = {(1,): 3}

    def stock(*given: Any) -> tuple[list[list[int]], None]:
        asked.append(engine.max_completion_length)
        return [[5] * asked[0]], None

    assert completer.complete(trainer, [[1]], None, {}, 1, stock) == ([[5] * 3], None)
    assert (asked, engine.max_completion_length) == ([24], 40)
