"""Guarded runs, as their users start them: a learning rate that destroys the policy at its first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo.extras.testing.commands import command

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
    done = command("grpo.replay", "run", "step=2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal, bit for bit, in all steps from checkpoint-1 to step 2" in done.stdout


@pytest.mark.vllm
def test_the_engine_samples_from_the_restored_policy(tmp_path: Path) -> None:
    done = command("grpo.train", *GUARDED, "generation=vllm_colocate", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "guard.jsonl").read_text().splitlines()]
    assert events == ["best", "rollback", "rollback", "fall"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows] == [True] * 3
    assert rows[1]["completions/mean_terminated_length"] == pytest.approx(rows[0]["completions/mean_length"], rel=0.3)


def test_early_stopping_of_transformers_sees_evaluations(tmp_path: Path) -> None:
    options = ["train.eval_strategy=steps", "train.eval_steps=1", "train.save_steps=1", "hydra.run.dir=run"]
    options += ["train.metric_for_best_model=rewards/correctness/mean", "train.load_best_model_at_end=true"]
    done = command(
        "grpo.train", *SMALL, *options, "+callbacks.early.fn=transformers.EarlyStoppingCallback", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert read(run / "summary.json")["steps"] == 2, "no evaluation after the first is better"
    assert read(run / "checkpoint-2" / "trainer_state.json")["best_global_step"] == 1
    best, model = (load_file(run / folder / "model.safetensors") for folder in ("checkpoint-1", "model"))
    assert all(torch.equal(best[name], model[name]) for name in best)


def test_an_evaluation_without_problems_is_a_line(tmp_path: Path) -> None:
    done = command("grpo.train", "train.eval_strategy=steps", "task.eval.size=0", cwd=tmp_path)
    assert done.returncode == 2
    assert "train.eval_strategy=steps: needs held-out problems, task.eval.size=200" in done.stderr


@pytest.mark.parametrize("override", ["guard=true", "guard.every=5", "guard=accuracy guard.evry=5"])
def test_a_guard_that_is_misspelled_is_a_line(override: str, tmp_path: Path) -> None:
    done = command("grpo.train", *override.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert {"guard=true": "a choice is a name", "guard.every=5": "guard=accuracy"}.get(override, "did you mean") in (
        done.stderr
    )
