"""Rollouts in flight: which a step takes, which are too old, checkpoints; the real server is in tests/e2e."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from grpo.config.facts import Facts, generator_of
from grpo.config.rules import refusal
from grpo.generation.kept_tokens import KeptLogprob
from grpo.options import Engine, Rollout, Update
from grpo.trainer import ExactGRPOTrainer, trl
from grpo.trainer.rollout.async_rollouts import AsyncRollouts, Begun, Made, loaded, saved, wait_for_nobody_in_threads
from grpo.trainer.rollout.completion import Completion
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling
from grpo.trainer.rollout.engine_check import EngineCheck
from grpo.trainer.rollout.problem_order import ProblemOrder
from grpo.trainer.rollout.tool_calls import parsed
from grpo.utils.errors import GenerationError
from tests.combinations.trainings import Scripted
from tests.stock_trl import compare_engine_at, note_kept, ours


class Slow(Scripted):
    """Completions of two tokens; the batch of one number waits, and that of another fails."""

    waits: ClassVar[int | None] = None
    fails: ClassVar[int | None] = None
    batches: ClassVar[list[list[int]]] = []
    ended = threading.Event()
    aborted: ClassVar[list[str]] = []

    def generate(self, prompts: list, images: list | None, num_generations: int, profiler: Any = None) -> tuple:
        self.batches.append(prompts[0])
        number = len(self.batches) - 1
        if number == self.waits:
            assert self.ended.wait(60)
        if number == self.fails:
            raise GenerationError("the server went away")
        completions = [[10 + place % 7, 20] for place, _ in enumerate(prompts)]
        return prompts, completions, [[[-2.0], [-3.0]] for _ in prompts], None

    def abort(self, name: str) -> None:
        self.aborted.append(name)


@pytest.fixture(autouse=True)
def _scripted() -> Iterator[None]:
    Slow.waits = Slow.fails = None
    Slow.batches.clear()
    Slow.aborted.clear()
    Slow.ended.clear()
    yield
    Slow.ended.set()


def trainer(folder: Path, staleness: int, **options: Any) -> ExactGRPOTrainer:
    engine = Engine("merged", staleness=staleness, backend=f"{__name__}.Slow")
    server = {"use_vllm": True, "vllm_mode": "server", "rollout_func": None, "reward_funcs": length}
    made = ours(folder, engine=engine, **server | {"max_steps": 6} | options)
    compare_engine_at(made, torch.inf)  # these are log-probabilities of no policy
    return made


def length(completion_ids: list[list[int]], log_metric: Any, **columns: Any) -> list[float]:
    log_metric("calls", 1.0)
    return [float(ids[0]) for ids in completion_ids]


def logged(made: ExactGRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in made.state.log_history if name in row]


def test_each_step_learns_from_the_oldest_batch(tmp_path: Path) -> None:
    made = trainer(tmp_path, 2)
    kept = note_kept(made)
    made.train()
    assert logged(made, "sampling/staleness") == [0, 1, 2, 2, 2, 2]
    assert logged(made, "rollout/dropped") == [0] * 6
    assert logged(made, "calls") == [1] * 6, "of the rewards of each batch"
    problems = [one.problem for batch in kept for one in batch[::4]]
    assert len(set(problems)) == len(problems) == 24
    assert len(Slow.batches) == 6, "nothing begins that no step would learn from"


def test_a_batch_that_lasts_too_long_is_dropped_and_begun_again(tmp_path: Path) -> None:
    Slow.waits = 0
    made = trainer(tmp_path, 2)
    kept = note_kept(made)
    made.train()
    assert logged(made, "rollout/dropped") == [0, 0, 0, 16, 0, 0]
    assert len(Slow.aborted) == 1
    problems = [one.problem for batch in kept for one in batch[::4]]
    assert len(set(problems)) == len(problems) == 24, "its problems are among them"
    assert max(logged(made, "sampling/staleness/max")) == 2


def test_dynamic_sampling_takes_several_batches_a_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, 2, rollout=Rollout(dynamic_sampling=True, max_rounds=2), max_steps=3, reward_funcs=equal)
    made.train()
    assert logged(made, "rollout/rounds") == [2, 2, 2]
    assert logged(made, "rollout/groups_generated") == [8, 8, 8]


def equal(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def test_a_failure_in_a_thread_ends_the_training(tmp_path: Path) -> None:
    Slow.fails = 2
    with pytest.raises(GenerationError, match="the server went away"):
        trainer(tmp_path, 1).train()


class EndsLater(TrainerCallback):
    """The batch that waits ends after the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            Slow.ended.set()


def test_a_checkpoint_has_what_was_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1}
    Slow.waits = 1
    before = trainer(tmp_path / "before", 2, **saving, max_steps=3)
    kept = note_kept(before)
    before.add_callback(EndsLater())
    before.train()
    used = {one.problem for one in kept[0]}
    resumed = trainer(tmp_path / "after", 2)
    again = note_kept(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "before" / "checkpoint-1"))
    assert "the rollouts of 4 problems were in flight at the checkpoint and begin again; 4 more were" in caplog.text
    assert {one.problem for one in again[0]} == {one.problem for one in kept[1]}, "of the finished batch"
    problems = [one.problem for batch in again for one in batch[::4]]
    assert len(set(problems) | used) == 24, "all others begin again"


def test_a_batch_with_images_begins_again_after_a_checkpoint() -> None:
    """Those of an observation or of tools: a checkpoint is loaded without code, and holds no pictures."""
    order = ProblemOrder(2, 0, shuffle=False)
    sampling = DynamicSampling(Rollout(), order, 1, {"correct": 1.0}, "correct")
    in_flight = AsyncRollouts(2, sampling, EngineCheck("float32", "cpu", of_script=False))
    for problem, images in enumerate((None, ["plot"])):
        begun = Begun([problem], policy=0)
        begun.rollouts.set_result(
            Made([([Completion(problem, [1], [2], None, None, "?", "", [1.0], {}, images)], False)])
        )
        in_flight._begun.append(begun)
    state = in_flight.state_dict()["in_flight"]
    assert ([finished["problems"] for finished in state["finished"]], state["again"]) == ([[0]], [[1]])


def test_a_finished_batch_is_saved_with_its_kept_tokens(tmp_path: Path) -> None:
    logps = [KeptLogprob(-1.5, [3, 4]), None]
    completion = Completion(7, [1], [2, 3], None, logps, "a", "b", [1.0], {"x": {"y": 2}}, policy=3)
    begun = Begun([7], policy=3)
    begun.rollouts.set_result(Made([([completion], False)], {"m": [1.0]}))
    torch.save(saved(begun), tmp_path / "file")
    again = loaded(torch.load(tmp_path / "file", weights_only=True))
    assert (again.problems, again.policy, again.rollouts.result()) == ([7], 3, begun.rollouts.result())
    (((completion,), _),) = again.rollouts.result().groups
    assert list(completion.logps[0].kept) == [3, 4]


def test_a_trainer_without_a_server_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.staleness=3: only a server generates while the policy trains"):
        ours(tmp_path, engine=Engine(staleness=3), rollout_func=None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"vllm_mode": "colocate"}, "only a server"),
        ({"use_vllm": False}, "only a server"),
        ({"vllm_importance_sampling_correction": False}, "need train.vllm_importance_sampling_correction=true"),
        ({"top_p": 0.9}, "train.top_p=0.9: vLLM tells which tokens this filter kept with train.top_k="),
        ({"num_iterations": 2}, "a generation has to be for one step"),
        ({"steps_per_generation": 4}, "a generation has to be for one step"),
        ({"generation_batch_size": 16}, "a generation has to be for one step"),
        ({"images": True}, "works with text alone"),
        ({"in_process": True}, "would use the device of the policy during its update"),
    ],
)
def test_what_cannot_be_in_flight_is_named(tmp_path: Path, options: dict[str, Any], reason: str | None) -> None:
    server = {"use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False}
    features = {"images": False, "in_process": False}
    facts = {name: options.get(name, value) for name, value in features.items()}
    options = server | {name: value for name, value in options.items() if name not in features}
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, **options)
    found = refusal(
        Facts(
            args,
            Update(),
            Engine(staleness=1),
            Rollout(),
            1,
            "cpu",
            generator_of(args),
            None,
            False,
            False,
            mixture=False,
            stream=False,
            **facts,
        )
    )
    assert found is None if reason is None else reason in (found or "")


def test_a_column_that_arrow_does_not_know_is_lost_alone() -> None:
    columns = {"mixed": [1, "a"], "large": 2**70, "keys": {1: 2}, "number": 3.5}
    begun = Begun([7], policy=0)
    begun.rollouts.set_result(Made([([Completion(7, [1], [2, 3], None, None, "a", "b", [1.0], columns)], False)]))
    (((completion,), _),) = loaded(saved(begun)).rollouts.result().groups
    assert completion.columns == {"mixed": None, "large": None, "keys": None, "number": 3.5}


def test_tool_calls_are_parsed_alike_in_overlapping_threads() -> None:
    """Each would put back the parser that it has found: the first one the library's, the last one ours for ever."""
    wait_for_nobody_in_threads()
    seen: list[Any] = []
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def first(prompts: list) -> None:
        first_is_in.set()
        second_is_in.wait(10)

    def second(prompts: list) -> None:
        second_is_in.set()
        other.join(10)
        seen.append(grpo_trainer.parse_response)

    other = threading.Thread(target=lambda: trl.generate(SimpleNamespace(_generate=first), [], parsed))
    other.start()
    first_is_in.wait(10)
    trl.generate(SimpleNamespace(_generate=second), [], parsed)
    assert seen == [parsed]
