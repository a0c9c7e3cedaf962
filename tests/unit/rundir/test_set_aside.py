"""What a resume makes obsolete is kept, where nothing picks it."""

import json
from pathlib import Path

import pytest

from grpo.rundir.files import read_json, read_lines
from grpo.rundir.resume import newest_checkpoint
from grpo.rundir.set_aside import set_aside
from grpo.utils.manifest import seal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 10 steps that has come to its end, with checkpoints at 2, 4, 8 and 10."""
    for step in (2, 4, 8, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
        seal(tmp_path / f"checkpoint-{step}")
    for name in ("model", "export", "evaluate", "completions"):
        (tmp_path / name).mkdir()
    for name in ("evaluation_before.jsonl", "evaluation_after.jsonl", "evaluation_after.sums.jsonl", "report.html"):
        (tmp_path / name).touch()
    for name in ("completions_00002.parquet", "completions_00010.parquet", "tokens_00010.parquet"):
        (tmp_path / "completions" / name).touch()
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 11)))
    (tmp_path / "evaluation.json").write_text('{"before": {"accuracy": 0.1}, "after": {"accuracy": 0.9}}')
    (tmp_path / "summary.json").write_text('{"status": "completed"}')
    return tmp_path


def kept(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not any(path.glob("*")))


ENDED = ["evaluate", "evaluation.json", "evaluation_after.jsonl", "evaluation_after.sums.jsonl", "export", "model"]
ENDED = sorted([*ENDED, "report.html"])


def test_going_back_sets_everything_later_aside(run: Path) -> None:
    folder = set_aside(run, 4, 10)
    assert folder == run / "set_aside" / "1"
    assert newest_checkpoint(run) == run / "checkpoint-4"
    assert {path.name for path in folder.iterdir()} >= {*ENDED, "checkpoint-8", "checkpoint-10", "metrics.jsonl"}
    assert sorted(path.name for path in (run / "completions").iterdir()) == ["completions_00002.parquet"]
    assert newest_checkpoint(folder) == folder / "checkpoint-10"
    assert len(read_lines(folder / "metrics.jsonl")) == 10
    assert read_json(run / "evaluation.json") == {"before": {"accuracy": 0.1}}
    assert read_json(folder / "evaluation.json")["after"] == {"accuracy": 0.9}
    (run / "model").mkdir()
    (folder.parent / "1").rename(folder.parent / "7")
    assert set_aside(run, 4, 10) == run / "set_aside" / "8"


def test_an_extension_sets_the_results_of_the_end_aside(run: Path) -> None:
    assert set_aside(run, 10, 10) is None
    assert (run / "model").is_dir()
    folder = set_aside(run, 10, 20)
    assert folder
    assert kept(folder) == ENDED
    assert newest_checkpoint(run) == run / "checkpoint-10"


@pytest.mark.parametrize("written", ["", "rng_state_1.pth"])
def test_a_killed_run_sets_nothing_aside(run: Path, written: str) -> None:
    for name in ("model", "evaluation_after.jsonl", "evaluation_after.sums.jsonl"):
        (run / name).rmdir() if name == "model" else (run / name).unlink()
    half = run / "checkpoint-12"
    half.mkdir()
    if written:
        (half / written).touch()
    assert set_aside(run, 10, 20) is None
    assert not half.exists()
    (run / "checkpoint-10" / "manifest.json").rename(run / "checkpoint-10" / "manifest.json.partial-1")
    folder = set_aside(run, 8, 20)  # killed while it was sealed: it has everything, and is not deleted
    assert folder
    assert json.loads((run / "evaluation.json").read_text()).keys() == {"before"}
    assert (folder / "checkpoint-10").is_dir()
