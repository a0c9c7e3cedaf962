"""Sweeps by the launchers and sweepers of Hydra that `make extras` installs."""

import pytest
import yaml

from grpo.extras.testing.commands import outcomes, sweep

pytestmark = [pytest.mark.slow, pytest.mark.long]

SMALL = ["train.max_steps=1", "task.eval.size=4", "task.dataset.size=128", "train.per_device_train_batch_size=16"]


def test_joblib_runs_jobs_at_once_and_reports_a_plan_too_large(tmp_path):
    pytest.importorskip("joblib", reason="make extras installs it")
    arguments = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "model=tiny,qwen2_5_32b", *SMALL]
    done = sweep(tmp_path, *arguments)
    assert done.returncode == 1
    found = outcomes(tmp_path)
    assert found["0"]["status"] == "completed"
    assert found["1"]["reason"].startswith("does not fit: ")
    assert "#1 model=qwen2_5_32b: does not fit: " in done.stderr.splitlines()[-1]


def test_submitit_runs_jobs_on_this_machine(tmp_path):
    pytest.importorskip("submitit", reason="make extras installs it")
    done = sweep(tmp_path, "hydra/launcher=submitit_local", "train.num_generations=4,7", *SMALL)
    assert done.returncode == 1
    assert outcomes(tmp_path)["0"]["status"] == "completed"
    assert "a batch of 16 completions does not hold whole groups" in outcomes(tmp_path)["1"]["reason"]


def test_ray_runs_jobs(tmp_path):
    pytest.importorskip("ray", reason="make extras installs it")
    done = sweep(tmp_path, "hydra/launcher=ray", "train.num_generations=4,7", *SMALL)
    assert done.returncode == 1, done.stderr
    assert outcomes(tmp_path)["0"]["status"] == "completed"
    assert "a batch of 16 completions does not hold whole groups" in outcomes(tmp_path)["1"]["reason"]


def test_optuna_sees_the_accuracy_of_each_job(tmp_path):
    pytest.importorskip("optuna", reason="make extras installs it")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "train.num_generations=choice(4,7)"]
    done = sweep(tmp_path, *search, *SMALL)
    found = outcomes(tmp_path)
    best = max((job["accuracy_after"] for job in found.values() if job["status"] == "completed"), default=None)
    assert {job["status"] for job in found.values()} == {"completed", "failed"}
    assert done.returncode == 1
    assert yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())["best_value"] == best
