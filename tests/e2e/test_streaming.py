"""Runs whose problems are read while they train."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from safetensors.torch import load_file

from grpo.builtin.tasks import arithmetic
from grpo.extras.testing.commands import command

pytestmark = [pytest.mark.slow, pytest.mark.long]
OPTIONS = ["task=jsonl", "task.dataset.path=rows.jsonl", "task.conversational=false", "task.eval.size=20"]
OPTIONS += ["train.max_completion_length=24", "train.per_device_train_batch_size=16", "train.num_generations=4"]
OPTIONS += ["train.max_steps=6", "train.save_steps=2", "hydra.run.dir=run", "train.save_total_limit=9"]
STREAMED = ["task.dataset.streaming=true", "task.buffer_size=9"]
MACHINE = ("time/", "memory/", "gpu/", "step_time", "epoch")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty problems; a batch has four of them."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    found = arithmetic.rows("train", 60, 0)
    file.write_text("".join(json.dumps(row) + "\n" for row in found))
    return file


def run_in(folder: Path, rows: Path, *overrides: str, succeeds: bool = True) -> Any:
    folder.mkdir(exist_ok=True)
    shutil.copy(rows, folder / "rows.jsonl")
    done = command("grpo.train", *OPTIONS, *overrides, cwd=folder)
    assert (done.returncode == 0) == succeeds, done.stderr
    return done


def steps(folder: Path) -> list[dict[str, float]]:
    """What each step of a run logged, without times and memory."""
    made = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(MACHINE)} for row in made]


def same_weights(*folders: Path) -> bool:
    first, second = (load_file(folder / "run" / "model" / "model.safetensors") for folder in folders)
    return all(weight.equal(second[name]) for name, weight in first.items())


def asked(folder: Path) -> list[list[str]]:
    """The questions of each step."""
    files = sorted((folder / "run" / "completions").glob("*.parquet"))
    return [pyarrow.parquet.read_table(file)["prompt"].to_pylist() for file in files]


@pytest.mark.parametrize("more", [[], ["train.num_iterations=2", "rollout.dynamic_sampling=true"]], ids=len)
def test_a_stream_in_order_is_the_run_of_the_file(tmp_path: Path, rows: Path, more: list[str]) -> None:
    ordered = ["train.shuffle_dataset=false", *more]
    run_in(tmp_path / "streamed", rows, *ordered, *STREAMED)
    run_in(tmp_path / "whole", rows, *ordered, "task.split='train[20:]'", "task.eval.split='train[:20]'")
    assert steps(tmp_path / "streamed") == steps(tmp_path / "whole")
    assert same_weights(tmp_path / "streamed", tmp_path / "whole")


@pytest.mark.parametrize("more", [[], ["train.num_iterations=2", "rollout.dynamic_sampling=true"]], ids=len)
def test_a_shuffled_stream_resumes_bit_for_bit(tmp_path: Path, rows: Path, more: list[str]) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = [*STREAMED, "train.max_steps=14", *more]  # into the second epoch
    run_in(whole, rows, *options)
    for checkpoint in (4, 12):
        shutil.rmtree(resumed, ignore_errors=True)
        resumed.mkdir()
        shutil.copytree(whole / "run" / f"checkpoint-{checkpoint}", resumed / "run" / f"checkpoint-{checkpoint}")
        done = run_in(resumed, rows, *options, "train.resume_from_checkpoint=auto")
        assert f"resuming from run/checkpoint-{checkpoint}" in done.stderr
        assert steps(resumed) == [row for row in steps(whole) if row["step"] > checkpoint]
        assert same_weights(whole, resumed)
    counts = json.loads((resumed / "run" / "summary.json").read_text())["data"]["train"]
    assert counts == json.loads((whole / "run" / "summary.json").read_text())["data"]["train"]
    assert counts["rows"] > 40


def test_two_processes_take_the_problems_of_one(tmp_path: Path, rows: Path) -> None:
    run_in(tmp_path / "one", rows, *STREAMED)
    two = ["launch.processes=2", "train.per_device_train_batch_size=8"]
    run_in(tmp_path / "two", rows, *STREAMED, *two)
    assert asked(tmp_path / "one") == asked(tmp_path / "two")
    assert len({question for step in asked(tmp_path / "one") for question in step}) == 24
    done = run_in(tmp_path / "two", rows, *STREAMED, *two, "train.max_steps=8", "train.resume_from_checkpoint=auto")
    assert "resuming from run/checkpoint-6" in done.stderr
    run_in(tmp_path / "one", rows, *STREAMED, "train.max_steps=8", "train.resume_from_checkpoint=auto")
    assert asked(tmp_path / "one") == asked(tmp_path / "two")
    assert len(asked(tmp_path / "one")) == 8


BROKEN = """
def rows(split, **arguments):
    '''Twenty-four problems, and a fault.'''
    for number in range(24):
        yield {"question": f"Mia has {number} pens .", "answer": str(number)}
    raise ValueError("garbage")
"""


def test_a_fault_in_the_middle_keeps_the_completed_steps(tmp_path: Path, rows: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    options = ["+task.dataset.generator=broken.rows", "task.eval.size=4", "train.save_steps=9"]
    done = run_in(tmp_path, rows, *STREAMED, *options, succeeds=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("split train: behind row 22: garbage")
    assert (tmp_path / "run" / "checkpoint-4").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_each_command_takes_a_stream(tmp_path: Path, rows: Path) -> None:
    run_in(tmp_path, rows, *STREAMED, "train.max_steps=2")
    shown = [word for word in [*OPTIONS, *STREAMED] if not word.startswith("hydra")]
    few = ["preflight.problems=6", "preflight.samples=2", "preflight.format=json"]
    done = command("grpo.preflight", *shown, *few, cwd=tmp_path)
    assert json.loads(done.stdout)["problems"] == 6, done.stderr
    done = command("grpo.evaluate", "run", "evaluate.samples=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert command("grpo.plan", *shown, cwd=tmp_path).returncode == 0
