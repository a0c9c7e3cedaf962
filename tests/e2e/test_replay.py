"""`grpo.replay` and `grpo.why`, as their users call them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.extras.testing.commands import command

pytestmark = pytest.mark.slow
SMALL = ["train.max_steps=4", "train.save_steps=2", "replay.keep=2", "task.eval.size=0", "train.report_to=none"]
SMALL += ["peft=lora", "peft.lora_dropout=0.1"]  # random numbers after the sampling
SMALL += ["train.per_device_train_batch_size=16", "train.num_generations=8", "+reward.short.fn=short.py:short"]
REWARD = (
    "def short(completions, longest=30, **columns):\n    return [float(len(text) <= longest) for text in completions]\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "short.py").write_text(REWARD)
    done = command("grpo.train", *SMALL, "hydra.run.dir=run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_plan_has_the_bytes_of_the_records(folder: Path) -> None:
    done = command("grpo.plan", *SMALL, "plan.format=json", cwd=folder)
    planned = json.loads(done.stdout)["replay_gb"] * 2**30
    size = sum(file.stat().st_size for file in (folder / "run" / "replay").iterdir())
    assert 0.2 * planned < size < planned


def replayed(folder: Path, *words: str) -> Any:
    done = command("grpo.replay", *words, "--json", cwd=folder)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_a_step_is_computed_again_bit_for_bit(folder: Path) -> None:
    done = command("grpo.replay", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "equal, bit for bit, in all steps from checkpoint-2 to step 4" in done.stdout
    assert done.stdout.count("equal") == 13


def test_the_first_steps_are_computed_from_the_beginning(folder: Path) -> None:
    more = ["hydra.run.dir=short", "train.max_steps=1", "task.eval.size=4"]
    assert command("grpo.train", *SMALL, *more, cwd=folder).returncode == 0
    shutil.rmtree(folder / "short" / "checkpoint-1")
    done = command("grpo.replay", "short", cwd=folder)
    assert "equal, bit for bit, in all steps from the beginning of the run to step 1" in done.stdout, done.stderr


def test_a_changed_record_is_named(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "copy")
    file = folder / "copy" / "replay" / "rollouts_00003.pt"
    record = torch.load(file, weights_only=True)
    record["batch"]["advantages"][5] += 0.01
    torch.save(record, file)
    result = replayed(folder, "copy", "step=4")
    (first,) = result["differences"]
    assert (first["step"], first["stage"], first["where"]) == (3, "advantages", "advantages of completion 5")


def test_other_rewards_score_the_stored_completions(folder: Path) -> None:
    result = replayed(folder, "run", "step=3", "reward.short.kwargs={longest: 20}")
    assert {item["stage"] for item in result["differences"]} == {"rewards"}
    rewards = result["rewards"]["rewards"]
    assert rewards["correctness"]["changed"] == 0
    assert rewards["short"]["mean_now"] < rewards["short"]["mean"]
    assert rewards["short"]["changed"] == round(16 * (rewards["short"]["mean"] - rewards["short"]["mean_now"]))


def test_runs_that_part_are_told_apart(folder: Path) -> None:
    other = command("grpo.train", *SMALL, "hydra.run.dir=other", "train.beta=0.1", "train.max_steps=1", cwd=folder)
    assert other.returncode == 0, other.stderr
    done = command("grpo.why", "run", "other", cwd=folder)
    assert done.returncode == 1
    assert "the runs part in step 1: log-probabilities before the update" in done.stdout
    assert "can be why: train.beta=0.0 and 0.1" in done.stdout
    assert "cannot be why: train.max_steps=4 and 1: it acts on the learning rate" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "step=9"], "run: step=9: its last step is 4; steps 3 to 4 can be computed"),
        (["run", "step=1"], "run: step=1: its records are not kept; replay.keep is the number of steps that are"),
        (
            ["run", "step=3", "step=4"],
            "step=4: behind the run stands one step=N, from 1, or reward.NAME.fn=…",
        ),
        (["nowhere"], "nowhere: there is no such directory"),
        (["run/replay"], "run/replay: no run, as there is no resolved_config.yaml"),
        (["run", "reward.short.fn=missing.py:short"], "there is no file"),
        (["run", "reward.shrot.kwargs.longest=3"], "reward.shrot: the run has no such reward; did you mean short?"),
        (["run", "reward.short.kwargs={longest: [3"], "reward.short.kwargs={longest: [3"),
    ],
)
def test_wrong_input_is_a_line(folder: Path, words: list[str], message: str) -> None:
    done = command("grpo.replay", *words, cwd=folder)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.returncode == 2


def test_a_torn_record_is_named(folder: Path) -> None:
    shutil.copytree(folder / "run", folder / "torn")
    for name in ("update_00004.pt", "rollouts_00003.pt", "origin.json"):
        file = folder / "torn" / "replay" / name
        content = file.read_bytes()
        file.write_bytes(content[:1000])
        done = command("grpo.replay", "torn", cwd=folder)
        assert f"torn/replay/{name}: " in done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == 2
        file.write_bytes(content)
    shutil.rmtree(folder / "torn" / "checkpoint-2")
    done = command("grpo.replay", "torn", cwd=folder)
    assert "step=4: the checkpoint before it, or the records of a step in between, are missing" in done.stderr


def test_a_reward_that_fails_is_counted(folder: Path) -> None:
    done = command("grpo.replay", "run", "reward.correctness.kwargs={find: [nothing]}", cwd=folder)
    assert "reward.correctness: KeyError: 'nothing'" in done.stdout, done.stdout + done.stderr
    assert "the stages after the rewards are computed from the rewards of the run" in done.stdout


def test_what_cannot_be_kept_is_refused_before_loading(folder: Path) -> None:
    done = command("grpo.train", *SMALL, "replay.keep=3", "hydra.run.dir=third", cwd=folder)
    assert done.returncode == 2
    assert "reach 2 steps back; train.save_total_limit=3, or fewer steps" in done.stderr
