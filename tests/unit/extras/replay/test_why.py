"""Where two runs part, and which of their differences can be why."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo.config.library import GRPO_CONFIG, library_fields
from grpo.extras.replay.acts import NOTHING, stage_of
from grpo.extras.replay.compare import STAGES, of_tensors
from grpo.extras.replay.recorder import recorder
from grpo.extras.replay.why import compared, keys_of, of_both
from grpo.options import Update
from grpo.rundir.files import RESOLVED_CONFIG
from grpo.utils.errors import ConfigError
from tests.stock_trl import ours, train


def run_of(folder: Path, **options: Any) -> Path:
    config = {"model": {"dtype": "float32"}, "reward": {"first": {"fn": "rewards.correctness.correctness"}}}
    config["train"] = {"bf16": False, "report_to": folder.name, **options}
    folder.mkdir()
    (folder / RESOLVED_CONFIG).write_text(yaml.safe_dump(config))
    trainer = ours(folder, Update(max_tokens_per_microbatch=64), max_steps=3, **options)
    trainer.add_callback(recorder(trainer, 5))
    train(trainer)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("runs") / "a", learning_rate=1e-3)


def test_equal_runs_do_not_part(run: Path, tmp_path: Path) -> None:
    result = compared(run, run_of(tmp_path / "b", learning_rate=1e-3))
    assert result["parts"] is None
    (row,) = result["keys"]
    assert (row["key"], row["can"], row["reason"]) == ("train.report_to", False, "it changes no step")


def test_runs_part_where_their_option_acts(run: Path, tmp_path: Path) -> None:
    result = compared(run, run_of(tmp_path / "b", learning_rate=2e-3))
    assert result["parts"] == {"step": 1, "stage": "learning rate"}
    assert [(row["key"], row["can"]) for row in result["keys"]] == [
        ("train.learning_rate", True),
        ("train.report_to", False),
    ]
    assert [item["stage"] for item in result["differences"]] == ["learning rate", "weights"]


def test_only_steps_before_the_asked_one_are_compared(run: Path, tmp_path: Path) -> None:
    other = run_of(tmp_path / "b", learning_rate=1e-3, lr_scheduler_type="cosine")
    assert compared(run, other)["parts"] == {"step": 2, "stage": "learning rate"}
    result = compared(run, other, until=2)
    assert result["parts"] is None
    (row,) = [row for row in result["keys"] if row["key"] == "train.lr_scheduler_type"]
    assert row["reason"] == "all stages are equal up to step 1"
    with pytest.raises(ConfigError, match="step=9: the last step that both runs have kept is 3"):
        compared(run, other, until=9)


def test_a_difference_of_numbers_is_a_difference() -> None:
    """Rollouts have tensors without a dimension."""
    before, now = ({"num_items_in_batch": torch.tensor(count)} for count in (3, 4))
    assert list(of_tensors("num_items_in_batch", before, now)) == [("num_items_in_batch", 1.0, "3, now 4")]
    (missing,) = of_tensors("num_items_in_batch", {}, now)
    assert of_both(missing[2]) == "the first run has none"


def test_a_key_of_a_later_stage_cannot_be_why() -> None:
    origins = [{"config": {"train": {"max_grad_norm": norm, "temperature": norm}}} for norm in (1.0, 0.5)]
    rows = {row["key"]: row for row in keys_of(*origins, (5, "completions"), 9)}
    assert rows["train.temperature"]["can"]
    assert not rows["train.max_grad_norm"]["can"]
    assert rows["train.max_grad_norm"]["reason"].endswith("after the completions as a batch of step 5")


def test_a_run_without_records_says_since_when(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run, as there is no resolved_config\.yaml"):
        compared(run, tmp_path)
    (tmp_path / RESOLVED_CONFIG).write_text("{}")
    with pytest.raises(ConfigError, match="there are no digests of its steps; records of its steps are kept from"):
        compared(run, tmp_path)
    with pytest.raises(ConfigError, match="no step in common before step 1: there are steps 1 to 3 of"):
        compared(run, run, until=1)


def test_most_options_of_trl_have_a_stage() -> None:
    known = {*STAGES, NOTHING}
    stages = {name: stage_of(f"train.{name}") for name in library_fields(GRPO_CONFIG)}
    assert {stage for stage in stages.values() if stage} <= known
    unknown = [name for name, stage in stages.items() if stage is None]
    assert len(unknown) < 5, unknown
    assert stage_of("reward.short.weight") == "advantages"
    assert stage_of("reward.short.fn") == "rewards"
