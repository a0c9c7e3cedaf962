"""The forecast on the command line: samples, report, verdict, exit status, and what is kept."""

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from grpo.extras.testing import commands

FEW = ("preflight.problems=16", "preflight.samples=4", "task.dataset.size=256", "train.max_steps=40")
GROUPS = (2, 4, 8, 16, 32, 64)


def preflight(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return commands.command("grpo.preflight", *FEW, *arguments, cwd=folder, environment={"COLUMNS": "120"})


def samples_in(folder: Path) -> list[dict]:
    (file,) = (folder / "outputs" / "preflight").glob("*/samples.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("preflight")
    return folder, preflight(folder, "train.num_generations=2")


def test_a_run_that_learns_gets_a_report_and_a_verdict(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, process = done
    assert process.returncode == 0, process.stderr
    for text in ("16 problems, 4 completions each", "accuracy", "@64", "now 2", "truncated", "marked", "per step"):
        assert text in process.stdout
    verdict = next(line for line in process.stdout.splitlines() if line.startswith("will learn"))
    assert "of groups have non-zero variance" in verdict
    *_, command, page = process.stdout.splitlines()
    assert command.startswith("python -m grpo.train")
    assert page.startswith("page: outputs/preflight/")


@pytest.mark.slow
@pytest.mark.long
def test_completions_and_rewards_are_those_of_the_first_step(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = done
    kept = samples_in(folder)
    assert [len(problem["completions"]) for problem in kept] == [4] * 16
    assert len({problem["problem"] for problem in kept}) == 16
    for problem in kept:
        for one in problem["completions"]:
            assert one["rewards"] == {"correctness": float(one["correct"])}
            assert (one["ended"], one["tokens"] <= 24) == (True, True)
    run = commands.command(
        *("grpo.train", "hydra.run.dir=run", "train.num_generations=2", "train.max_steps=1", "task.eval.size=0"),
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr
    first = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    (report,) = (folder / "outputs" / "preflight").glob("*/preflight.json")
    low, high = json.loads(report.read_text())["rewards"]["correctness"]["mean"]["interval"]
    assert low - 0.15 < first["reward"] < high + 0.15


def test_a_second_call_samples_nothing_and_prints_json_alone(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = done
    before = samples_in(folder)
    again = preflight(folder, "train.num_generations=2", "preflight.format=json")
    assert "16 of 16 problems were sampled before" in again.stderr
    report = json.loads(again.stdout)
    assert (again.returncode, report["learns"], samples_in(folder)) == (0, True, before)
    assert [row["num_generations"] for row in report["groups"]] == list(GROUPS)
    fractions = [row["fraction"]["value"] for row in report["groups"]]
    assert fractions == sorted(fractions), "larger groups vary more often"
    assert sum(row["best"] for row in report["groups"]) == 1
    assert report["time"]["measured"] == ["generation", "rewards", "update"]


@pytest.mark.slow
@pytest.mark.long
def test_more_problems_continue_those_that_are_there(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = done
    before = samples_in(folder)
    more = preflight(folder, "train.num_generations=2", "preflight.problems=20", "preflight.format=json")
    assert "16 of 20 problems were sampled before" in more.stderr
    assert json.loads(more.stdout)["problems"] == 20
    assert samples_in(folder)[:16] == before


@pytest.mark.slow
@pytest.mark.long
def test_the_suggested_command_is_one_that_can_be_planned(
    done: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = done
    report = json.loads(preflight(folder, "train.num_generations=2", "preflight.format=json").stdout)
    assert report["suggestions"][0]["fraction"] > 1.25 * report["now"]["fraction"]["value"]
    words = shlex.split(report["command"])
    assert words[:3] == ["python", "-m", "grpo.train"]
    assert not [word for word in words if word.startswith("preflight.")]
    assert set(report["suggestions"][0]["overrides"]) <= set(words)
    planned = commands.command("grpo.plan", *words[3:], cwd=folder)
    assert planned.returncode == 0, planned.stderr


def test_the_command_has_the_folder_of_the_configurations(tmp_path: Path) -> None:
    (tmp_path / "mine" / "task").mkdir(parents=True)
    rows = "{generator: grpo.builtin.tasks.arithmetic.rows, size: 256, seed: 0}"
    (tmp_path / "mine" / "task" / "words.yaml").write_text(
        f'# @package _global_\ntask: {{dataset: {rows}, prompt: "{{question}}\\n", max_prompt_length: 64}}\n'
    )
    line = ("--config-dir", "mine", "task=words", "train.max_completion_length=24")
    process = commands.command("grpo.preflight", *line, "preflight.problems=4", "preflight.samples=2", cwd=tmp_path)
    assert process.returncode in (0, 1), process.stderr
    (last,) = [text for text in process.stdout.splitlines() if text.startswith("python -m grpo.train")]
    planned = commands.command("grpo.plan", *shlex.split(last)[3:], cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert f"--config-dir={tmp_path}/mine" in last


@pytest.mark.slow
@pytest.mark.long
def test_truncated_completions_are_why_a_run_does_not_learn(tmp_path: Path) -> None:
    line = ("train.max_completion_length=3", "train.mask_truncated_completions=true", "plan.hourly_price=2")
    process = preflight(tmp_path, *line)
    assert process.returncode == 1, process.stderr
    assert "will probably not learn: 100 % of completions are truncated, and" in process.stdout
    assert "cost" in process.stdout


@pytest.mark.slow
@pytest.mark.long
def test_sampling_is_at_the_temperature_of_the_run(tmp_path: Path) -> None:
    process = preflight(tmp_path, "train.temperature=0.01", "preflight.format=json")
    report = json.loads(process.stdout)
    assert (process.returncode, report["learns"]) == (1, False)
    assert report["groups"][0]["fraction"]["value"] < 0.02, "all completions of a problem are the likeliest one"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", ["calculator", "shapes"])
def test_tools_and_images_are_those_of_the_run(tmp_path: Path, experiment: str) -> None:
    process = preflight(tmp_path, f"+experiment={experiment}", "preflight.format=json")
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert report["accuracy"]["value"] > 0.1, "without its tool, or its images, the policy answers nothing correctly"
    assert report["chat_template"] == "the model's own"


@pytest.mark.vllm
def test_vllm_samples_where_it_generates_in_the_run(tmp_path: Path) -> None:
    process = preflight(tmp_path, "generation=vllm_colocate", "preflight.format=json")
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert (report["engine"], report["ended"]["value"]) == ("vLLM", 1.0)
    assert report["accuracy"]["value"] > 0.05


@pytest.mark.slow
@pytest.mark.long
def test_a_reward_that_fails_on_every_completion_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fails(completions, **columns):\n    raise ValueError('no such thing')\n")
    line = ("+reward.fails.fn=mine.py:fails", "train.per_device_train_batch_size=512")
    process = preflight(tmp_path, *line)
    assert process.returncode == 1, process.stderr
    assert "will not learn: reward.fails failed on every completion" in process.stdout
    assert "no such thing" in process.stdout


@pytest.mark.slow
@pytest.mark.long
def test_rewards_that_contradict_each_other_are_reported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rewards.correctness import correctness\n\n\n"
        "def against(completions, answer, **columns):\n"
        "    return [1 - 2 * one for one in correctness(completions, answer)]\n"
    )
    process = preflight(tmp_path, "+reward.against.fn=mine.py:against", "+reward.against.weight=2", "train.seed=3")
    assert process.returncode == 1, process.stderr
    assert "correctness and against: correlation -1.00" in process.stdout
    assert "incorrect completions get the higher reward" in process.stdout
    assert process.stdout.count("disagree ") == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["preflight.problems=1"], "preflight.problems=1: at least 2"),
        (["preflight.samples=1"], "preflight.samples=1: completions per problem, 2 to 64"),
        (["preflight.format=yaml"], "preflight.format=yaml: unknown; possible: json, text"),
        (["task.dataset.size=1", "train.per_device_train_batch_size=8"], "task: 1 problem to train on"),
        (["task=jsonl", "task.dataset.path=none.jsonl"], "task.dataset"),
        (["preflight.smaples=4"], "preflight.smaples"),
        (["-m", "train.seed=1,2"], "one command line at a time"),
    ],
)
def test_wrong_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    process = preflight(tmp_path, *arguments)
    assert (process.returncode, process.stdout) == (2, ""), process.stderr
    said = [line for line in process.stderr.splitlines() if line.startswith("grpo.preflight: ")]
    assert len(said) == 1
    assert message in said[0]


@pytest.mark.slow
@pytest.mark.long
def test_a_reward_that_dies_leaves_what_was_sampled(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "calls = []\n\n\ndef dies(completions, **columns):\n    calls.append(1)\n"
        "    assert len(calls) < 3, 'tired'\n    return [0.0 for _ in completions]\n"
    )
    line = ("+reward.dies.fn=mine.py:dies", "+reward.dies.on_error=raise", "train.per_device_train_batch_size=16")
    process = preflight(tmp_path, *line)
    assert (process.returncode, process.stdout) == (2, "")
    assert "tired" in process.stderr.splitlines()[-1]
    assert "8 problems are kept; the same command continues" in process.stderr.splitlines()[-1]
    assert len(samples_in(tmp_path)) == 8


@pytest.mark.long
@pytest.mark.slow
def test_an_interrupt_keeps_the_samples_and_a_call_continues(tmp_path: Path) -> None:
    line = ("preflight.problems=200", "preflight.samples=4", "task.dataset.size=256")
    line += ("train.per_device_train_batch_size=8",)
    process = commands.Command("grpo.preflight", *line, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("outputs/preflight/*/samples.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 130, ended.stderr
    assert "the same command continues" in ended.stderr.splitlines()[-1]
    kept = samples_in(tmp_path)
    assert 0 < len(kept) < 200
    again = commands.command("grpo.preflight", *line, cwd=tmp_path)
    assert f"{len(kept)} of 200 problems were sampled before" in again.stderr
    assert (again.returncode, len(samples_in(tmp_path))) == (0, 200)
    assert samples_in(tmp_path)[: len(kept)] == kept
