import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from grpo.errors import ConfigError
from grpo.runs.resume import continue_interrupted, is_complete, newest_checkpoint, resolve


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """Write the files of a checkpoint in the order in which the Trainer does."""
    folder = run_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"weight": torch.zeros(100)}, folder / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"state": torch.zeros(10)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def write_run(outputs: Path, name: str, overrides: list[str], status: str | None, step: int | None = 10) -> Path:
    run_dir = outputs / "2026-01-01" / name
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    if status:
        (run_dir / "summary.json").write_text(json.dumps({"status": status}))
    if step:
        write_checkpoint(run_dir, step)
    return run_dir


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]
)
def test_a_checkpoint_with_a_file_cut_off_is_not_whole(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path, 5)
    assert is_complete(checkpoint)
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:-1])
    assert not is_complete(checkpoint)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_checkpoint_with_a_file_missing_is_not_whole(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path, 5)
    (checkpoint / name).unlink()
    assert not is_complete(checkpoint)


def test_the_newest_whole_checkpoint_is_the_one_with_most_steps(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for step in (9, 10, 100):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-100" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


def test_a_run_directory_and_a_checkpoint_can_be_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "run", 5)
    assert resolve(str(tmp_path / "run"), tmp_path / "other") == checkpoint
    assert resolve(str(checkpoint), tmp_path / "other") == checkpoint
    assert resolve("auto", tmp_path / "run") == resolve(True, tmp_path / "run") == checkpoint
    assert resolve("auto", tmp_path / "other") is None
    assert resolve(None, tmp_path / "run") is None


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        resolve(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        resolve(str(tmp_path / "nothing"), tmp_path)
    (write_checkpoint(tmp_path, 5) / "optimizer.pt").unlink()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        resolve(str(tmp_path / "checkpoint-5"), tmp_path)


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    before = Path.cwd()
    os.chdir(tmp_path)
    yield Path("outputs")
    os.chdir(before)


AUTO = "train.resume_from_checkpoint=auto"


def test_auto_goes_on_in_the_newest_interrupted_run_of_the_same_command(outputs: Path) -> None:
    mine = ["train.seed=1", "+gpu=h100"]
    write_run(outputs, "01-00-00", mine, "stopped")
    killed = write_run(outputs, "02-00-00", [*reversed(mine), AUTO], None)
    write_run(outputs, "03-00-00", mine, "completed")
    write_run(outputs, "04-00-00", ["train.seed=2"], "stopped")
    write_run(outputs, "05-00-00", mine, "stopped", step=None)
    assert continue_interrupted([*mine, AUTO]) == [*mine, AUTO, f"hydra.run.dir={killed}"]
    shutil.rmtree(killed)
    assert continue_interrupted([*mine, AUTO])[-1].endswith("01-00-00")


def test_auto_starts_anew_when_there_is_nothing_to_go_on_with(outputs: Path) -> None:
    assert continue_interrupted([AUTO]) == [AUTO]
    write_run(outputs, "01-00-00", ["train.seed=1"], "stopped")
    assert continue_interrupted([AUTO]) == [AUTO]


def test_a_run_directory_that_is_named_stays(outputs: Path) -> None:
    write_run(outputs, "01-00-00", [], "stopped")
    assert continue_interrupted([AUTO, "hydra.run.dir=here"]) == [AUTO, "hydra.run.dir=here"]
    assert continue_interrupted(["train.seed=1"]) == ["train.seed=1"]
