"""Values per token: which completions have them, and what they are; the combinations compare each with stock TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer

from grpo.options import Rollout, Update
from grpo.trainer.update import token_values
from grpo.trainer.update.token_values import TokenValues, texts
from tests.stock_trl import make, ours, train

MOVED: dict[str, Any] = {"num_iterations": 2, "max_steps": 4, "learning_rate": 2e-2, "epsilon": 0.05}
"""Every second step has a policy that has moved away from the one that generated."""


def rows_of(folder: Path, name: str, step: int) -> list[dict[str, Any]]:
    return parquet.read_table(folder / "completions" / f"{name}_{step:05d}.parquet").to_pylist()


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        ("clip_ratio/region_mean", {"loss_type": "dapo"}),
        ("clip_ratio/region_mean", {"loss_type": "grpo", "delta": 1.1}),
        ("clip_ratio/region_mean", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 1e-3}),
        ("cispo_clip_ratio", {"loss_type": "cispo", "epsilon_high": 1.0}),
    ],
    ids=str,
)
def test_clipped_tokens_are_those_that_stock_trl_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(token_values, "SAMPLE", 100)
    options = MOVED | options
    mine = ours(tmp_path, Update(skip_zero_advantage=False), log_tokens=True, **options)
    weights = train(mine).weights
    logs = train(make(GRPOTrainer, tmp_path / "stock", **options), weights).logs
    counted = []
    for step, logged in enumerate(logs, 1):
        rows = rows_of(tmp_path, "tokens", step)
        assert len(rows) == 16
        of_rows = [row["clipped"] for row in rows]
        if "importance_sampling_level" in options:
            of_rows = [of_row[:1] for of_row in of_rows]  # of a sequence it is one value
        clipped = [value for of_row in of_rows for value in of_row]
        counted.append(sum(clipped) / len(clipped))
        assert counted[-1] == pytest.approx(logged[metric], abs=1e-6)
    assert max(counted) > 0


@pytest.mark.parametrize("loss", ["dppo", "maxrl", "sapo", "vespo"])
def test_a_loss_of_any_kind_has_values(tmp_path: Path, loss: str) -> None:
    options = {"scale_rewards": "none"} if loss == "maxrl" else {}
    train(ours(tmp_path, log_tokens=True, loss_type=loss, **MOVED | options))
    clipped = [value for step in range(1, 5) for row in rows_of(tmp_path, "tokens", step) for value in row["clipped"]]
    assert any(clipped) == (loss in ("dppo", "maxrl"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
        {"rollout": Rollout(dynamic_sampling=True)},
        {"update": Update()},
    ],
    ids=["one slice", "four slices", "dynamic sampling", "the longest sequence first"],
)
def test_a_row_belongs_to_the_completion_of_its_id(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = ours(
        tmp_path,
        log_tokens=True,
        keep_columns=True,
        log_completions=True,
        num_completions_to_print=0,
        eval_strategy="steps",  # whose completions get into the same table
        eval_steps=1,
        per_device_eval_batch_size=4,
        eval_dataset=Dataset.from_dict({"prompt": ["2 plus 2"]}),
        **MOVED | options,
    )
    trainer.budget.begun = "update" not in options
    train(trainer)
    met = 0
    for step in range(1, 5):
        completions = {row["completion_id"]: row for row in rows_of(tmp_path, "completions", step)}
        for row in rows_of(tmp_path, "tokens", step):
            if found := completions.get(row["completion_id"]):
                met += 1
                special = trainer._tokenizer.all_special_tokens
                assert "".join(token for token in row["token"] if token not in special) == found["completion"]
                assert len(row["token"]) == found["completion_tokens"]
                assert row["advantage"] == pytest.approx([found["advantage"]] * found["completion_tokens"], rel=1e-6)
    assert met > 16


def test_eight_completions_of_a_step_are_kept(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(skip_zero_advantage=False), log_tokens=True, max_steps=4, logging_steps=2)
    train(trainer)
    assert sorted(file.name for file in (tmp_path / "completions").glob("tokens*")) == [
        "tokens_00002.parquet",
        "tokens_00004.parquet",
    ]
    rows = rows_of(tmp_path, "tokens", 4)
    numbers = {row["completion_id"] for row in rows}
    assert len(numbers) == len(rows) == 8
    assert numbers < {*range(48, 64)}  # of the fourth step
    assert all(
        len(values) == len(row["token"]) for row in rows for name, values in row.items() if name != "completion_id"
    )


def test_values_begin_in_a_resumed_run_with_its_next_generation(tmp_path: Path) -> None:
    train(ours(tmp_path, save_strategy="steps", save_steps=1, **MOVED))
    resumed = ours(tmp_path, log_tokens=True, **MOVED)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    files = sorted(file.name for file in (tmp_path / "completions").glob("tokens*"))
    assert files == ["tokens_00003.parquet", "tokens_00004.parquet"]


def test_nothing_is_kept_where_nobody_asked(tmp_path: Path) -> None:
    train(ours(tmp_path, keep_columns=True, log_completions=True, num_completions_to_print=0))
    assert not list((tmp_path / "completions").glob("tokens*"))
    assert "completion_id" not in rows_of(tmp_path, "completions", 1)[0]


def test_tokens_of_tools_and_images_are_told_apart(tmp_path: Path) -> None:
    inputs = {
        "completion_ids": torch.tensor([[5, 9, 6, 9, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 0, 0, 1, 1]]),
    }
    assert TokenValues(tmp_path, None, image_token=9)._kinds(inputs).tolist() == [[0, 2, 1, 0, 0]]
    assert TokenValues(tmp_path, None, image_token=None)._kinds(inputs).tolist() == [[0, 1, 1, 0, 0]]


def test_a_value_that_is_not_finite_is_missing(tmp_path: Path) -> None:
    trainer = ours(tmp_path, log_tokens=True, max_steps=1)
    compute = trainer._compute_loss

    def spoilt(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        inputs["advantages"] = inputs["advantages"] * torch.nan
        return compute(model, inputs)

    trainer._compute_loss = spoilt
    train(trainer)
    rows = rows_of(tmp_path, "tokens", 1)
    assert all(value is None for row in rows for value in row["advantage"])
    assert all(value is not None for row in rows for value in row["logp"])


def test_a_character_of_several_tokens_is_whole() -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, []))
    bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    ids = tokenizer("é b")["input_ids"]
    assert texts(tokenizer, ids) == ["", "é", " ", "b"]


def test_a_repeated_step_begins_without_values(tmp_path: Path) -> None:
    trainer = ours(
        tmp_path, Update(max_tokens_per_microbatch=64, skip_zero_advantage=False), log_tokens=True, max_steps=1
    )
    note, known = trainer.watchers[0].note, list[int]()

    def little_memory(*args: Any) -> None:
        known.append(len(trainer.watchers[0]._rows))
        if len(known) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        note(*args)

    trainer.watchers[0].note = little_memory
    train(trainer)
    assert known[1] > 0, "or the first attempt had nothing to forget"
    assert known[2] == 0
