"""What overlaps: batches drawn ahead, and what is refused; the real server is in tests/e2e/test_vllm_run.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from trl import GRPOConfig

from grpo.config.options import Engine, Rollout
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout.overlap import Overlap
from grpo.utils.diagnosis import why_not_stale
from tests.stock_trl import ours

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> ExactGRPOTrainer:
    trainer = ours(tmp_path_factory.mktemp("overlap"))
    trainer.rollouts.overlap = Overlap()
    return trainer


@pytest.mark.parametrize("number", [6, 7], ids=["whole steps", "a shorter last step"])
def test_the_batches_of_each_step_are_those_of_transformers(trainer: ExactGRPOTrainer, number: int) -> None:
    def epoch(draw: Any) -> list[list[str]]:
        batches = iter([[f"batch {index}"] for index in range(number)])
        sizes = [2] * (number // 2) + [1] * (number % 2)
        return [draw(batches, size, CPU)[0] for size in sizes]

    for _ in range(2):
        stock = epoch(lambda *arguments: transformers.Trainer.get_batch_samples(trainer, *arguments))
        assert epoch(trainer.get_batch_samples) == stock


def test_the_next_steps_first_batch_is_known_within_the_epoch(trainer: ExactGRPOTrainer) -> None:
    batches = iter([[index] for index in range(4)])
    for following in ([2], None):
        trainer.get_batch_samples(batches, 2, CPU)
        assert trainer.rollouts.overlap.next_rows(0, 10) == following


def test_an_epoch_that_was_left_leaves_nothing_to_the_next(trainer: ExactGRPOTrainer) -> None:
    trainer.get_batch_samples(iter([[index] for index in range(4)]), 2, CPU)
    assert trainer.get_batch_samples(iter([[10], [11], [12]]), 2, CPU)[0] == [[10], [11]]


def test_rollouts_begin_early_except_for_checks_and_the_end() -> None:
    overlap, begins = Overlap(), []
    overlap.take(iter([[{"prompt": ""}]] * 4), 1)
    for step in range(10):
        check = 5 if step < 5 else 55
        begins.append(overlap.next_rows(step, min(10, check)) is not None)
    assert begins == [True] * 4 + [False] + [True] * 4 + [False]


def test_a_trainer_without_a_server_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only a server generates while the policy trains"):
        ours(tmp_path, engine=Engine(staleness=1))


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
        ({"tools": True}, "the turns of a conversation cannot begin"),
        ({"rollout": Rollout(prioritize=True)}, "rollout.prioritize=true takes them as needed"),
        ({"mixture": True}, "a mixture of tasks takes them as needed"),
    ],
)
def test_what_cannot_overlap_is_named(tmp_path: Path, options: dict[str, Any], reason: str | None) -> None:
    server = {"use_vllm": True, "vllm_mode": "server", "use_cpu": True, "bf16": False}
    features = {"rollout": Rollout(), "images": False, "tools": False, "mixture": False}
    given = {name: options.get(name, value) for name, value in features.items()}
    options = server | {name: value for name, value in options.items() if name not in features}
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, **options)
    found = why_not_stale(args, **given)
    assert found is None if reason is None else reason in (found or "")
