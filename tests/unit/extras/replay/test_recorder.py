"""What a training keeps of its steps, and how two recorded steps are compared."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.extras.replay.compare import Difference, Records, differences
from grpo.extras.replay.recorder import FOLDER, recorder, step_of
from grpo.options import Update
from grpo.rundir.files import read_lines
from tests.stock_trl import ours, train

MOVED: dict[str, Any] = {"num_iterations": 2, "max_steps": 6, "beta": 0.05, "save_strategy": "steps", "save_steps": 2}
"""Two steps of each generation, and a reference."""


def recorded(folder: Path, keep: int = 2, **options: Any) -> Path:
    trainer = ours(folder, Update(max_tokens_per_microbatch=64), **MOVED | options)
    callback = recorder(trainer, keep)
    assert callback is not None
    trainer.add_callback(callback)
    train(trainer)
    return folder / FOLDER


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("run"), keep=10)


def compared(run: Path, copy: Path, step: int) -> list[Difference]:
    return differences(Records(run, ["first", "second"]), Records(copy, ["first", "second"]), step, 1e-4)


def changed(
    run: Path, copy: Path, kind: str, change: Callable[[dict[str, Any]], None], step: int = 3
) -> list[Difference]:
    shutil.copytree(run, copy)
    file = copy / f"{kind}_{step:05d}.pt"
    record = torch.load(file, weights_only=True)
    change(record)
    torch.save(record, file)
    return compared(run, copy, step)


def test_equal_runs_have_equal_records(kept: Path, tmp_path: Path) -> None:
    other = recorded(tmp_path, keep=10)
    for step in range(1, 7):
        assert compared(kept, other, step) == []
    assert read_lines(kept / "steps.jsonl") == read_lines(other / "steps.jsonl")


def test_another_rate_shows_from_its_stage_on(kept: Path, tmp_path: Path) -> None:
    other = recorded(tmp_path, keep=10, learning_rate=1e-2)
    assert [item.stage for item in compared(kept, other, 1)] == ["learning rate", "weights"]
    assert compared(kept, other, 2)[0].stage == "log-probabilities"


def test_nothing_is_kept_unless_asked(tmp_path: Path) -> None:
    assert recorder(ours(tmp_path), 0) is None


def test_only_what_the_last_steps_need_is_kept(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    rollouts, updates = (
        sorted(step_of(file) for file in folder.glob(f"{kind}_*.pt")) for kind in ("rollouts", "update")
    )
    assert rollouts == [5], "of steps 5 and 6, computed from checkpoint-4"
    assert updates == [4, 5, 6]
    assert [line["step"] for line in read_lines(folder / "steps.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("stage", "kind", "change"),
    [
        ("problems", "rollouts", lambda record: record["order"].reverse()),
        ("completions", "rollouts", lambda record: record["batch"]["completion_ids"][1, 0].add_(1)),
        ("rewards", "rollouts", lambda record: record["rewards"][2].__setitem__(0, 7.0)),
        ("advantages", "rollouts", lambda record: record["batch"]["advantages"][3].add_(1e-3)),
        ("old log-probabilities", "rollouts", lambda record: record["batch"]["ref_per_token_logps"][3, 0].add_(0.1)),
        ("log-probabilities", "update", lambda record: next(iter(record["log_probs"].values())).add_(0.1)),
        ("loss", "update", lambda record: record.update(loss=record["loss"] + 1)),
        ("learning rate", "update", lambda record: record.update(learning_rate=[0.5])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_value_is_of_its_stage(
    kept: Path, tmp_path: Path, stage: str, kind: str, change: Callable[[dict[str, Any]], None]
) -> None:
    (difference,) = changed(kept, tmp_path / "copy", kind, change)
    assert difference.stage == stage
    assert not difference.rounding


@pytest.mark.parametrize("kind", ["gradient", "weights", "optimizer"])
def test_a_changed_fingerprint_names_its_tensor(kept: Path, tmp_path: Path, kind: str) -> None:
    def change(record: dict[str, Any]) -> None:
        name = list(record[kind])[1]
        bits, norm, sketch = record[kind][name]
        record[kind][name] = (bits + 1, norm, sketch + 0.5 * norm / 8)

    (difference,) = changed(kept, tmp_path / "copy", "update", change)
    assert difference.stage == kind
    assert difference.where.split()[0].endswith("weight")
    assert difference.size == pytest.approx(0.5, rel=0.1)


def test_little_differences_are_rounding(kept: Path, tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        for values in record["log_probs"].values():
            values += 2e-6

    (difference,) = changed(kept, tmp_path / "copy", "update", change)
    assert difference.rounding


def test_records_of_another_number_of_processes_are_removed(kept: Path, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    for name in ("rollouts_00001_0.pt", "update_00000_1.pt"):
        shutil.copy(kept / "update_00001.pt", tmp_path / FOLDER / name)
    folder = recorded(tmp_path, keep=10)
    assert compared(kept, folder, 1) == []
    assert list(folder.glob("*_?.pt")) == []


def test_a_checkpoint_that_cannot_be_resumed_removes_no_records(tmp_path: Path) -> None:
    folder = recorded(tmp_path, save_only_model=True)
    assert sorted(step_of(file) for file in folder.glob("update_*.pt")) == [0, 1, 2, 3, 4, 5, 6]
