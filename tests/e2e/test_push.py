"""Runs with `train.push_to_hub`, and a stand-in of the hub."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from tests.hub_server import READS, WRITES, HubServer

SMALL = ["train.max_steps=2", "train.save_steps=1", "train.per_device_train_batch_size=4", "train.num_generations=4"]


def run(hub: HubServer, token: str, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run a training as a client of a hub; not forked, as its address is read when the client is imported."""
    line = [sys.executable, "-m", "grpo.train", *SMALL, "task.eval.size=4", f"hydra.run.dir={folder}"]
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False, "cwd": ROOT}
    line += ["train.push_to_hub=true", "train.hub_model_id=me/run", *overrides]
    return subprocess.run(line, env=hub.environment(token), **options)


def test_a_run_pushes_checkpoints_and_result_and_no_logs(tmp_path: Path) -> None:
    with HubServer() as hub:
        done = run(hub, WRITES, tmp_path / "run", "train.hub_strategy=checkpoint", "train.hub_always_push=true")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"{hub.url}/me/run"
    repository = hub.repositories["me/run"]
    progress = [f"Training in progress, step {step}{of}" for step in (1, 2) for of in ("", ", checkpoint")]
    assert repository["commits"] == [*progress, "Upload a model trained with GRPO"]
    assert repository["private"]
    model, last = tmp_path / "run" / "model", tmp_path / "run" / "checkpoint-2"
    expected = {file.name: file.read_bytes() for file in model.iterdir()}
    expected |= {f"last-checkpoint/{file.name}": file.read_bytes() for file in last.iterdir()}
    assert repository["files"] == expected
    assert "after training, greedy, 4 held-out problems" in repository["files"]["README.md"].decode()
    assert not list((tmp_path / "run").glob("*partial*"))
    assert "HTTP Request" not in (tmp_path / "run" / "train.log").read_text()


def test_failed_uploads_end_a_completed_run_with_a_line(tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.broken = True
        done = run(hub, WRITES, tmp_path / "run")
    assert done.returncode == 1
    assert f"the model is in {tmp_path}/run/model, `hf upload me/run" in done.stderr.splitlines()[-1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "completed"
    assert "step 1 was not uploaded to me/run: the hub answers 400" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.parametrize(
    ("token", "overrides", "says"),
    [(READS, [], "lets this token not write"), (WRITES, ["train.hub_model_id=me/open"], "is there and is public")],
)
def test_a_refused_upload_ends_a_run_before_it_begins(
    token: str, overrides: list[str], says: str, tmp_path: Path
) -> None:
    with HubServer() as hub:
        hub.repositories["me/open"] = {"private": False, "files": {}, "commits": []}
        done = run(hub, token, tmp_path / "run", *overrides)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
