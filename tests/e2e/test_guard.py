"""Guarded runs, as their users start them: a learning rate that destroys the policy at its first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo.testing.commands import command

pytestmark = pytest.mark.slow
SMALL = ["train.max_steps=3", "task.eval.reward=format", "task.eval.size=31", "train.report_to=none"]
SMALL += ["train.per_device_train_batch_size=16", "train.num_generations=8", "train.learning_rate=0.3"]
GUARDED = [*SMALL, "guard=accuracy", "guard.every=1"]


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def test_all_processes_go_back_and_end_together(tmp_path: Path) -> None:
    options = ["launch.processes=2", "guard.rollbacks=1", "hydra.run.dir=run"]
    done = command("grpo.train", *GUARDED, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "31 answers have become incorrect and 0 correct; back to checkpoint-0, with half the learning rate" in (
        done.stderr
    )
    run = tmp_path / "run"
    summary = read(run / "summary.json")
    assert (summary["status"], summary["steps"], summary["accuracy_after"]) == ("completed", 2, 1.0)
    assert [event["event"] for event in summary["guard"]["events"]] == ["rollback", "fall"]
    best, model = (load_file(run / folder / "model.safetensors") for folder in ("checkpoint-0", "model"))
    assert all(torch.equal(best[name], model[name]) for name in best)
    (finding,) = [it for it in read(run / "report.json")["findings"] if it["name"] == "guard_fall"]
    assert "train.learning_rate=0.075" in finding["advice"]
    assert "looks of the guard, greedy" in read(run / "report.json")["curves"][0]["lines"]


def test_a_step_after_a_rollback_is_computed_again(tmp_path: Path) -> None:
    options = ["replay.keep=3", "train.save_total_limit=null", "hydra.run.dir=run"]
    done = command("grpo.train", *GUARDED, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"rollback"' in (tmp_path / "run" / "guard.jsonl").read_text().splitlines()[1]
    for step in (1, 2):
        done = command("grpo.replay", "run", f"step={step}", cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("override", ["guard=true", "guard.every=5", "guard=accuracy guard.evry=5"])
def test_a_guard_that_is_misspelled_is_a_line(override: str, tmp_path: Path) -> None:
    done = command("grpo.train", *override.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert {"guard=true": "a choice is a name", "guard.every=5": "guard=accuracy"}.get(override, "did you mean") in (
        done.stderr
    )
