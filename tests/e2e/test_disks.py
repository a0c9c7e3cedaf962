"""A disk that fills up, becomes read-only or is gone ends a run in one line, and costs no complete checkpoint."""

import json
import subprocess
from pathlib import Path

import pytest

from grpo.extras.testing.commands import command
from grpo.utils.manifest import difference, is_sealed

pytestmark = [pytest.mark.slow, pytest.mark.long]

RUN = [
    "task.dataset.size=8",
    "task.eval.size=4",
    "train.max_steps=4",
    "train.per_device_train_batch_size=8",
    "train.num_generations=4",
    "train.save_steps=1",
    "train.save_total_limit=2",
    f"+reward.disk.fn={Path(__file__).with_name('faults.py')}:disk",
]
AUTO = "train.resume_from_checkpoint=auto"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("fill", "no space is left on its disk"),
        ("read-only", "its file system has become read-only"),
        ("replace", "the run directory disk/run has been removed or replaced"),
    ],
)
def test_a_disk_fault_fails_with_one_line_and_the_run_resumes(small_disk: Path, fault: str, says: str) -> None:
    run_dir = small_disk / "run"
    line = [*RUN, f"hydra.run.dir={run_dir}", f"+reward.disk.kwargs.run_dir={run_dir}"]
    done = command("grpo.train", *line, f"+reward.disk.kwargs.do={fault}", cwd=small_disk.parent)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("grpo.train: failed: ")
    assert says in last
    if fault == "replace":
        assert list(run_dir.iterdir()) == []
        return
    assert f"{AUTO} then continues from checkpoint-2" in last
    sealed = sorted(folder.name for folder in run_dir.glob("checkpoint-*") if is_sealed(folder))
    assert sealed == ["checkpoint-1", "checkpoint-2"]
    assert not any(difference(run_dir / name) for name in sealed)
    if fault == "fill":
        assert not (run_dir / "checkpoint-3").exists()  # what there was of it
        assert "a checkpoint needs" in done.stderr
        (small_disk / "filler").unlink()
    else:
        assert json.loads((run_dir / "summary.json").read_text())["reason"] in last
        subprocess.run(["umount", run_dir / "checkpoint-3"], check=True)
    done = command("grpo.train", *line, "+reward.disk.kwargs.do=nothing", AUTO, cwd=small_disk.parent)
    assert done.returncode == 0, done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 4
