"""`Rollouts` without a trainer: what stands in its place is what TRL's methods read."""

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from grpo.generation.transformers.continuous_batching import ContinuousBatching
from grpo.options import Rollout
from grpo.trainer.measurements import MemoryReadings, StepClock
from grpo.trainer.rollout import rollouts as module
from grpo.trainer.rollout.assemble import as_generated
from grpo.trainer.rollout.completer import Completer
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.problem_order import ProblemOrder
from grpo.trainer.rollout.rollouts import Rollouts
from grpo.trainer.rollout.sampling import Source

CPU = torch.device("cpu")


def rollouts(source: Source | None = None) -> Rollouts:
    return Rollouts(source or Source(), Completer(ContinuousBatching()))


def stand_in() -> Any:
    accelerator = SimpleNamespace(device=CPU, num_processes=1, process_index=0, gather=lambda tensor: tensor)
    model = SimpleNamespace(training=True)
    return SimpleNamespace(
        model=model,
        accelerator=accelerator,
        clock=StepClock(CPU),
        memory=MemoryReadings(on_gpu=False),
        num_generations=2,
        reward_funcs=[],
        reward_func_names=[],
        reward_weights=torch.ones(1),
        multi_objective_aggregation="sum_then_normalize",
        own_loss=None,
        use_vllm=False,
        tools=None,
        environment_factories=None,
        environments=None,
        eos_token_ids=[2],
        _is_vlm=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics={"train": defaultdict(list)},
        state=SimpleNamespace(global_step=3, num_input_tokens_seen=0),
        _logs={"extra": defaultdict(list), "advantages": [], "prompt": []},
        _pending_extra_logs=defaultdict(list),
        note=lambda metrics: None,
    )


def test_rollouts_have_advantages_and_the_step_they_were_made_at() -> None:
    made, trainer = rollouts(), stand_in()
    trainer.rollouts = made
    trainer._log_completion_extra = partial(GRPOTrainer._log_completion_extra, trainer)

    trainer._generate = lambda prompts: ([[1]] * 4, [[2]] * 4, None, ["two"] * 4, None, {}, None, [])

    def scores(*args: Any) -> torch.Tensor:
        trainer._pending_extra_logs["note"].append("too few")
        return torch.tensor([[0.1], [0.1], [0.0], [1.0]])

    trainer._calculate_rewards = scores

    def stock(rows: list[dict[str, Any]]) -> dict[str, Any]:
        assert trainer._generate([])[1] == [[2]] * 4
        assert trainer._calculate_rewards(rows, ["?"] * 4, ["two"] * 4, [[2]] * 4).shape == (4, 1)
        return {"prompt_ids": torch.zeros(4, 1), "advantages": torch.tensor([1e-5, -1e-5, -1.0, 1.0])}

    batch = made.make(trainer, [{"prompt": "?"}] * 4, stock)
    assert batch["advantages"].tolist() == [0.0, 0.0, -1.0, 1.0]  # rounding of equal rewards is no advantage
    assert int(batch["generated_at"]) == 3
    assert trainer._pending_extra_logs["note"] == ["too few", None, None, None]


def test_rollouts_continue_where_they_were() -> None:
    def sampling() -> DynamicSampling:
        order = ProblemOrder(10, 0, shuffle=True)
        return DynamicSampling(Rollout(dynamic_sampling=True), order, 1, {"correct": 1.0}, "correct")

    sources = [sampling(), sampling()]
    before, after = map(rollouts, sources)
    before.completer.batching.limit = 7
    sources[0].order.take(4)
    after.load_state_dict(before.state_dict())
    assert after.completer.batching.limit == 7
    after.completer.batching.limit = 3
    after.load_state_dict(before.state_dict())
    assert after.completer.batching.limit == 3, "a lower number has been asked for"
    assert sources[1].order.take(3) == sources[0].order.take(3)


def test_groups_of_another_size_are_sampled_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made, trainer, sizes = rollouts(), stand_in(), []

    trainer.rollouts, trainer.problems = made, range(10)

    def score(asked: Any, problems: list[int], rows: list[int]) -> list[tuple[list[int], bool]]:
        assert rows == [5, 5, 5, 7, 7, 7]
        sizes.append(asked.num_generations)
        made.completer._opened["picture"] = 1
        return [([problem], False) for problem in problems]

    monkeypatch.setattr(module, "groups_of", score)
    assert made.sample_groups(trainer, [5, 7], size=3) == [[5], [7]]
    assert (sizes, trainer.num_generations, made.completer._opened) == ([3], 2, {})


def test_images_of_tools_are_given_to_trl_with_those_of_the_data() -> None:
    """Also where only one of the chosen completions has any, and others come from a generation without them."""
    rows = [{"images": ["cat"]}, {"images": ["dog"]}, {"images": []}]
    drawn: list[dict[str, Any]] = [{}, {"images": ["dog", "plot"], "tool_images": ["plot"]}, {"tool_images": []}]
    completions = [Completion(0, [1], [2], [1], None, "?", [], [1.0], {}, **shown) for shown in drawn]
    *_, extra, images, tool_images = as_generated(rows, completions)
    assert (extra, images, tool_images) == ({}, [["cat"], ["dog", "plot"], []], [[], ["plot"], []])
    *_, images, _ = as_generated(rows[2:], completions[2:])
    assert images is None, "processors refuse a batch without any"
