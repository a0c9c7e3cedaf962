"""The run at W&B and trackio of a run that is resumed, and of the jobs of a sweep."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.extras.tracking.runs import FILE, tracked
from grpo.rundir.files import read_json, write_json
from grpo.rundir.sweep_dir import SWEEP

NAMES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR", "WANDB_RUN_GROUP")


def variables(
    monkeypatch: pytest.MonkeyPatch, folder: Path, preset: dict[str, str] | None = None, **options: Any
) -> tuple[dict[str, str], str | None]:
    """Return the variables that are set in a training in a folder, and the name of its run."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"report_to": ["wandb"], "should_log": True, "output_dir": str(folder), "run_name": None, **options}
    args = SimpleNamespace(**values)
    with monkeypatch.context() as patch:
        for name in NAMES:  # put back afterwards
            patch.setenv(name, "")
            del os.environ[name]
        os.environ.update(preset or {})
        tracked(SimpleNamespace(args=args))
        return {name: os.environ[name] for name in NAMES if name in os.environ}, args.run_name


def test_a_resumed_run_has_the_id_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "2026-01-01" / "12-00-00"
    first, name = variables(monkeypatch, folder)
    again, _ = variables(monkeypatch, folder)
    other, _ = variables(monkeypatch, tmp_path / "2026-01-01" / "13-00-00")
    assert name == "2026-01-01/12-00-00"
    assert first == again
    assert first["WANDB_RUN_ID"] == read_json(folder / FILE)["wandb"] != other["WANDB_RUN_ID"]
    assert (first["WANDB_RESUME"], first["WANDB_DIR"]) == ("allow", str(folder))
    assert "WANDB_RUN_GROUP" not in first


def test_the_jobs_of_a_sweep_are_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = tmp_path / "2026-01-01" / "12-00-00"
    sweep.mkdir(parents=True)
    write_json(sweep / SWEEP, {})
    first, name = variables(monkeypatch, sweep / "0")
    assert first["WANDB_RUN_GROUP"] == "2026-01-01/12-00-00"
    assert name == "2026-01-01/12-00-00/0"


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, name = variables(monkeypatch, tmp_path / "run", {"WANDB_RUN_ID": "mine"}, run_name="named")
    assert values["WANDB_RUN_ID"] == "mine"
    assert name == "named"


@pytest.mark.parametrize("options", [{"report_to": ["tensorboard"]}, {"should_log": False}])
def test_nothing_is_set_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    assert variables(monkeypatch, tmp_path / "run", **options) == ({}, None)
    assert not (tmp_path / "run" / FILE).exists()


@pytest.mark.slow
def test_wandb_and_trackio_have_one_run_of_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install -e '.[tracking]'")
    pytest.importorskip("trackio", reason="pip install -e '.[tracking]'")
    small = ["train.max_steps=2", "train.save_steps=1", "task.eval.size=0", "train.per_device_train_batch_size=16"]
    small += ["train.report_to=[wandb,trackio]", "hydra.run.dir=outputs/run"]
    places = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for more in ([], ["train.max_steps=3", "train.resume_from_checkpoint=auto"]):
        command = [sys.executable, "-m", "grpo.train", *small, *more]  # W&B does not survive a fork
        subprocess.run(command, cwd=tmp_path, env=os.environ | places, check=True, capture_output=True)
    runs = list((tmp_path / "outputs" / "run" / "wandb").glob("offline-run-*"))
    assert len(runs) == 2, "offline, W&B writes a folder per start, and joins them by their id"
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1
    with sqlite3.connect(tmp_path / "trackio" / "huggingface.db") as database:
        assert database.execute("select count(distinct run_id), min(run_name) from metrics").fetchone() == (
            1,
            "outputs/run",
        )
