"""A training that continues from a checkpoint, bit for bit beside one that was not interrupted."""

import datetime
import os
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from grpo.options import Rollout
from grpo.trainer import ExactGRPOTrainer, Update
from grpo.trainer.resume import keep_steps
from grpo.utils.manifest import difference, is_sealed
from grpo.view.stream import NUMBER, Stream
from tests.stock_trl import VOCABULARY, Record, ours, train

PROMPTS = Dataset.from_dict({"prompt": [f"How many ? {number}" for number in range(12)]})
TIMES = ("time/", "step_time", "memory/")


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions from PyTorch's own generator, whose state a checkpoint has."""
    completions = [torch.randint(3, VOCABULARY, (int(torch.randint(1, 20, ())),)).tolist() for _ in prompts]
    return {"prompt_ids": trainer._tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def logs_odd_columns(completions: list[str], log_extra: Any, trainer_state: Any, **columns: Any) -> list[float]:
    """A reward with columns of dates, of values that are no data, and of two kinds of values."""
    step, day = trainer_state.global_step, datetime.datetime(2026, 11, 22)
    for column, value in {
        "date": day,
        "object": object(),
        "number": 0.5,
        "large": 2**70,
        "surrogate": "\ud800",
    }.items():
        log_extra(column, [value if row % 2 else None for row in range(len(completions))])
    log_extra("mixed", [("text" if (row + step) % 2 else row) for row in range(len(completions))])
    return [float(len(text) % 5) for text in completions]


OPTIONS: dict[str, Any] = {
    "train_dataset": PROMPTS,  # three generations an epoch
    "rollout_func": rollouts,
    "save_strategy": "steps",
    "save_steps": 1,
    "num_train_epochs": 2,
    "max_steps": -1,
    "log_completions": False,
}
CASES: dict[str, dict[str, Any]] = {
    "two epochs": {},
    "columns of a reward beside the completions": {
        "reward_funcs": [logs_odd_columns],
        "num_iterations": 2,
        "log_completions": True,
    },
    "LoRA, 8-bit AdamW, two iterations": {
        "num_iterations": 2,
        "optim": "adamw_8bit",
        "peft_config": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1),
    },
    "two steps per generation, slices": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "loss_type": "bnpo",
    },
    "a reference that moves": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "num_iterations": 2},
    "an entropy bonus that adapts, logged every second step": {
        "use_adaptive_entropy": True,
        "entropy_coef": 0.01,
        "entropy_target": 5.0,
        "num_iterations": 2,
        "logging_steps": 2,
    },
    "dynamic sampling": {
        "rollout": Rollout(dynamic_sampling=True, prioritize=True),
        "num_iterations": 2,
        "num_train_epochs": 4,
    },
}


def comparable(record: Record) -> list[dict[str, Any]]:
    """The metrics without times and memory."""
    return [{name: value for name, value in row.items() if not name.startswith(TIMES)} for row in record.logs]


def made(folder: Path, case: str, **more: Any) -> ExactGRPOTrainer:
    return ours(folder, Update(100), **OPTIONS | CASES[case] | more)


@pytest.mark.parametrize("case", CASES)
def test_a_training_continues_from_its_checkpoints_bit_for_bit(tmp_path: Path, case: str) -> None:
    whole = made(tmp_path, case)
    record = train(whole)
    steps = whole.state.global_step
    assert steps >= 6
    completions = list(whole._logs["completion"])
    for step in (1, steps // 2 + 2):  # in the first generation; in the second epoch
        again = made(tmp_path / "again", case, save_strategy="no")
        rest = Record()
        again.add_callback(rest)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert again.state.global_step == steps
        for name, weight in whole.model.state_dict().items():
            assert torch.equal(again.model.state_dict()[name], weight), (step, name)
        assert comparable(rest) == comparable(record)[-len(rest.logs) :], step
        assert list(again._logs["completion"]) == completions, step
        assert again._logs["extra"] == whole._logs["extra"], step


def test_a_logged_value_that_cannot_be_written_costs_itself(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"log_extra\('object'\): some values cannot be in one column"):
        made(tmp_path, "columns of a reward beside the completions").train()
    columns = pyarrow.parquet.read_table(sorted((tmp_path / "completions").glob("*.parquet"))[-1]).to_pydict()
    half = len(columns["date"]) // 2
    assert columns["date"] == [None, datetime.datetime(2026, 11, 22)] * half
    assert columns["number"] == [None, 0.5] * half
    for lost in ("object", "large", "surrogate"):
        assert columns[lost] == [None] * 2 * half
    assert len({type(value) for value in columns["mixed"]} - {type(None)}) == 1
    assert columns["mixed"].count(None) == half


def test_a_training_whose_steps_are_all_done_does_no_further_one(tmp_path: Path) -> None:
    whole = made(tmp_path, "two epochs")
    whole.train()
    steps = whole.state.global_step
    again = made(tmp_path / "again", "two epochs")
    record = Record()
    again.add_callback(record)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{steps}"))
    assert (again.state.global_step, record.gradients) == (steps, [])
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight)


def test_a_checkpoint_is_sealed_before_an_older_one_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.trainer

    deleted: list[str] = []
    rotate = transformers.trainer.rotate_checkpoints

    def killed(**options: Any) -> None:
        sealed = [folder.name for folder in sorted(tmp_path.glob("checkpoint-*")) if difference(folder) is None]
        deleted.append(sealed[-1])
        rotate(**options)

    monkeypatch.setattr(transformers.trainer, "rotate_checkpoints", killed)
    trainer = ours(tmp_path, Update(100), **OPTIONS | {"max_steps": 3, "save_total_limit": 1})
    trainer.train()
    assert deleted == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    names = {file.name for file in (tmp_path / "checkpoint-3").iterdir()}
    assert {"manifest.json", "grpo_state.pt", "optimizer.pt", "trainer_state.json"} <= names


def test_a_checkpoint_has_what_this_run_wrote_and_stays(tmp_path: Path) -> None:
    ours(tmp_path, Update(100), **OPTIONS | {"max_steps": 1}).train()
    (tmp_path / "checkpoint-2").mkdir()
    for name in ("grpo_state_0.pt", "rng_state_1.pth", "manifest.json.partial"):  # of two processes that were killed
        (tmp_path / "checkpoint-2" / name).touch()
    os.utime(tmp_path / "checkpoint-1", (later := time.time() + 7200, later))  # the clock has been set back
    trainer = ours(tmp_path, Update(100), **OPTIONS | {"max_steps": 2, "save_total_limit": 1})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert difference(tmp_path / "checkpoint-2") is None
    assert not {"grpo_state_0.pt", "rng_state_1.pth"} & {file.name for file in (tmp_path / "checkpoint-2").iterdir()}


def test_the_steps_are_kept_beside_half_of_a_checkpoint(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(100), **OPTIONS | {"max_steps": 1})
    trainer.train()
    (tmp_path / "checkpoint-1" / "manifest.json").unlink()  # as if it had broken off there
    keep_steps(trainer)
    assert difference(tmp_path / "checkpoint-1") is None


def test_a_resume_logs_and_saves_as_often_as_it_says(tmp_path: Path) -> None:
    ours(tmp_path, Update(100), **OPTIONS | {"max_steps": 1}).train()
    other = {"max_steps": 4, "save_steps": 3, "entropy_coef": 0.25}
    trainer = ours(tmp_path, Update(100), **OPTIONS | other)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in (1, 3, 4)]
    assert trainer.entropy_coef == 0.25


def test_a_checkpoint_of_the_model_alone_is_not_resumed(tmp_path: Path) -> None:
    ours(tmp_path, Update(100), **OPTIONS | {"max_steps": 1, "save_only_model": True}).train()
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
    assert not is_sealed(tmp_path / "checkpoint-1")


def test_a_checkpoint_may_lack_what_a_run_has(tmp_path: Path) -> None:
    train(made(tmp_path, "a reference that moves"))
    stream = Stream(PROMPTS.to_iterable_dataset(), lambda rows, first: (rows, {"rows": len(rows)}), 5, None, "rows")
    numbers = {"train_dataset": Dataset.from_dict({NUMBER: range(len(PROMPTS))}), "shuffle_dataset": False}
    again = ours(tmp_path / "again", Update(100), **OPTIONS | numbers, stream=stream)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.state.global_step == again.state.max_steps > 2


def test_a_resumed_run_shares_prompts_if_the_first_run_did(tmp_path: Path) -> None:
    first = ours(tmp_path, **OPTIONS)
    first.packing.shared_prompts.results = {
        "padding": False,
        "text": False,
    }  # another machine would pass
    train(first)
    resumed = ours(tmp_path / "resumed", **OPTIONS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.packing.shared_prompts.results == {"padding": False, "text": False}
