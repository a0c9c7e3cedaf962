"""A run with dynamic sampling that is killed between two rounds of a step, and continued."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from grpo.extras.testing.commands import command

pytestmark = [pytest.mark.slow, pytest.mark.long]
SMALL = ["rollout.dynamic_sampling=true", "train.max_steps=5", "train.save_steps=2", "task.eval.size=0"]
SMALL += ["train.per_device_train_batch_size=32", "train.num_generations=4", "hydra.run.dir=run"]
SMALL += ["+reward.kill.fn=kill.py:kill", "+reward.kill.weight=0"]
KILL = """
import os, signal, sys
from pathlib import Path

def kill(completions, trainer_state, **columns):
    '''Kill the trainer in the second round of the fourth step, if armed.'''
    rounds = Path(f"rounds-{trainer_state.global_step}")
    rounds.write_text(rounds.read_text() + "x" if rounds.exists() else "x")
    if trainer_state.global_step == 3 and rounds.read_text() == "xx" and Path("armed").exists():
        Path("armed").unlink()
        os.kill(int(sys.argv[1]), signal.SIGKILL)
    return [0.0] * len(completions)
"""


def run_in(folder: Path, *overrides: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "kill.py").write_text(KILL)
    return command("grpo.train", *SMALL, *overrides, cwd=folder)


def steps(folder: Path) -> list[dict[str, float]]:
    """What each step of a run logged, without times and memory."""
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    machine = ("time/", "memory/", "gpu/", "step_time")
    return [{name: value for name, value in row.items() if not name.startswith(machine)} for row in rows]


def test_a_run_killed_between_two_rounds_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run_in(whole).returncode == 0
    killed.mkdir()
    (killed / "armed").touch()
    assert run_in(killed).returncode == -9
    assert not (killed / "armed").exists()
    assert steps(killed)[-1]["step"] == 3
    done = run_in(killed, "train.resume_from_checkpoint=auto")
    assert done.returncode == 0, done.stderr
    assert "resuming from run/checkpoint-2" in done.stderr
    assert steps(whole) == steps(killed)
    assert steps(whole)[3]["rollout/rounds"] > 1
    expected, found = (load_file(folder / "run" / "model" / "model.safetensors") for folder in (whole, killed))
    assert all(weight.equal(found[name]) for name, weight in expected.items())
