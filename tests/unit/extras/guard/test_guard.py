"""A guarded training: its looks, rollbacks, end and resume, with a grader that follows a script."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from safetensors.torch import load_file
from transformers import TrainerCallback

from grpo.evaluation.loop import Decoding, Evaluation
from grpo.extras.guard.guard import FILE, Guard, guarded, sampled
from grpo.rundir.files import read_lines
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import Record, ours, train

HELD_OUT = 16
SAMPLED: dict[str, Any] = {"rollout_func": None, "temperature": 1.0}
"""Rollouts that the policy samples, by the random numbers of the training."""


class Scripted:
    """A grader: of each look, the first answers are correct, as many as its script says; -1 fails on all."""

    def __init__(self, *script: int) -> None:
        self.script, self.errors = list(script), Counter[str]()

    def score(self, completions: list[Any], **columns: Any) -> list[float]:
        correct = self.script.pop(0)
        self.errors += Counter({"it failed": correct < 0})
        return [float(number < correct) for number in range(len(completions))]


def guard_of(trainer: ExactGRPOTrainer, *script: int, **options: Any) -> Guard:
    problems = Dataset.from_dict({"prompt": [f"{number} plus 1" for number in range(HELD_OUT)]})
    file = Path(trainer.args.output_dir) / "evaluation.jsonl"
    held_out = Evaluation(problems, Scripted(*script), Decoding(3), file, HELD_OUT, Console(quiet=True))  # type: ignore[arg-type]
    chosen = {"samples": HELD_OUT, "every": 1, "rollbacks": 2, "error": 0.05, "plateau": None, "rise": 0.1}
    guard = guarded(trainer, {"": held_out}, **chosen | options)
    trainer.add_callback(guard)
    return guard


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events(folder: Path) -> list[str | None]:
    return [look["event"] for look in read_lines(folder / FILE)]


class Moments(TrainerCallback):
    """The optimizer's state at the end of each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        state = optimizer.state_dict()["state"]
        self.states.append(
            {
                f"{number} {name}": value.clone()
                for number, values in state.items()
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
        )


def test_healthy_steps_are_those_without_a_guard(tmp_path: Path) -> None:
    plain = train(ours(tmp_path / "plain", max_steps=4, **SAMPLED))
    trainer = ours(tmp_path / "guarded", max_steps=4, **SAMPLED)
    guard_of(trainer, 1, 2, 3, 3, 4)
    watched = train(trainer)
    assert len(plain.weights) == len(watched.weights) == 4
    assert all(map(equal, plain.weights, watched.weights))
    assert all(map(equal, plain.gradients, watched.gradients))
    assert events(tmp_path / "guarded") == ["best", "best", "best", None, "best"]


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_bnb_8bit"])
def test_a_rollback_restores_and_halves_the_rate(tmp_path: Path, optim: str) -> None:
    options = {"max_steps": 6, "lr_scheduler_type": "linear", "optim": optim}
    trainer, moments = ours(tmp_path, **options, **SAMPLED), Moments()
    guard = guard_of(trainer, 8, 12, 0, 12, every=2)
    trainer.add_callback(moments)
    record = train(trainer)
    assert events(tmp_path) == ["best", "best", "rollback", "best"]
    assert equal(record.weights[4], record.weights[2]), "as before step 3"
    assert not equal(record.weights[4], record.weights[3])
    assert equal(moments.states[3], moments.states[1]), "as after step 2"
    rates = [log["learning_rate"] for log in record.logs]
    assert rates == pytest.approx([3e-3 * (1 - step / 6) / (1 + (step >= 4)) for step in range(6)])
    assert "12 answers have become incorrect and 0 correct" in guard.summary["guard"]["events"][0]["reason"]


def test_adapters_are_restored_in_place(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    trainer = ours(tmp_path, peft_config=lora, max_steps=3, **SAMPLED)
    guard_of(trainer, 12, 12, 0, 12)
    places = [id(weight) for weight in trainer.model.parameters()]
    record = train(trainer)
    assert [id(weight) for weight in trainer.model.parameters()] == places
    assert equal(record.weights[2], record.weights[0])
    assert not equal(record.weights[1], record.weights[0])


def test_rollouts_of_the_fallen_policy_are_dropped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "num_iterations": 4}
    plain, trainer = ours(tmp_path / "plain", **options), ours(tmp_path / "guarded", **options)
    guard_of(trainer, 12, 12, 0, 12, 12)
    train(plain)
    train(trainer)
    assert (plain.generations, trainer.generations) == (0, 1), "numbers of the last generation"


def test_a_synchronized_reference_is_restored(tmp_path: Path) -> None:
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "max_steps": 3}
    trainer, references = ours(tmp_path, **options), Record()
    guard_of(trainer, 8, 12, 0, 12)
    trainer.add_callback(references)
    seen: list[torch.Tensor] = []

    class Reference(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            seen.append(next(trainer.ref_model.parameters()).detach().clone())

    trainer.add_callback(Reference())
    trainer.train()
    assert torch.equal(seen[2], seen[1])
    assert not torch.equal(seen[1], seen[0])


def test_one_more_fall_ends_the_training(tmp_path: Path) -> None:
    trainer = ours(tmp_path, max_steps=6)
    guard = guard_of(trainer, 12, 0, 0, rollbacks=1)
    train(trainer)
    assert trainer.state.global_step == 2
    assert events(tmp_path) == ["best", "rollback", "fall"]
    assert guard.summary["guard"]["best_step"] == 0


def test_a_plateau_ends_the_training_if_asked(tmp_path: Path) -> None:
    trainer = ours(tmp_path, max_steps=6)
    guard_of(trainer, *[12] * 3, plateau=2)
    train(trainer)
    assert trainer.state.global_step == 2
    assert events(tmp_path) == ["best", None, "plateau"]


def test_the_best_checkpoint_becomes_the_model(tmp_path: Path) -> None:
    trainer = ours(tmp_path, max_steps=3)
    guard_of(trainer, 8, 12, 11, 10)
    train(trainer)
    best = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert equal(best, {name: weight for name, weight in trainer.model.state_dict().items() if name in best})


def test_a_failing_grader_is_no_fall(tmp_path: Path) -> None:
    trainer = ours(tmp_path, max_steps=2)
    guard_of(trainer, 12, -1, 11)
    train(trainer)
    assert events(tmp_path) == ["best", "skipped", None]


def test_of_equal_looks_the_last_step_is_the_best(tmp_path: Path) -> None:
    trainer = ours(tmp_path, max_steps=2)
    guard_of(trainer, 12, 12, 12)
    train(trainer)
    assert events(tmp_path) == ["best", None, "best"]


def test_a_resumed_run_continues_with_its_looks(tmp_path: Path) -> None:
    script = (8, 12, 0, 12, 13, 0, 0)
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant", **SAMPLED}
    whole = ours(tmp_path / "whole", **options)
    guard_of(whole, *script, rollbacks=1)
    train(whole)
    train_until(3, first := ours(tmp_path / "part", **options), script)
    assert first.state.global_step == 3
    resumed = ours(tmp_path / "part", **options)
    guard = guard_of(resumed, *script[4:], rollbacks=1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-3"))
    assert events(tmp_path / "part") == events(tmp_path / "whole") == ["best", "best", "rollback", None, "best", "fall"]
    assert {*resumed.lr_scheduler.get_last_lr()} == {*whole.lr_scheduler.get_last_lr()} == {1.5e-3}
    assert equal(resumed.model.state_dict(), whole.model.state_dict())
    assert guard.summary["guard"]["best_step"] == 4


def train_until(step: int, trainer: ExactGRPOTrainer, script: tuple[int, ...]) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == step

    guard_of(trainer, *script, rollbacks=1)
    trainer.add_callback(Stop())
    trainer.train()


def test_a_sample_is_evenly_spaced_over_all_tasks(tmp_path: Path) -> None:
    held_out = {
        name: Evaluation(
            Dataset.from_dict({"prompt": [str(row) for row in range(size)]}),
            Scripted(),  # type: ignore[arg-type]
            Decoding(3),
            tmp_path / "file",
            8,
            Console(),
        )
        for name, size in {"first": 30, "second": 10}.items()
    }
    looks = sampled(held_out, 8)
    assert looks["first"].problems["prompt"][:] == ["0", "5", "10", "15", "20", "25"]
    assert looks["second"].problems["prompt"][:] == ["0", "5"]
    assert len(sampled(held_out, 1000)["first"].problems) == 30
