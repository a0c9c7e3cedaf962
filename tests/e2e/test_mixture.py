"""A run with two tasks: metrics, evaluation and page by task; resumed, the same bit for bit."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
from safetensors.torch import load_file

from grpo.extras.testing.commands import command

OVERRIDES = ["+experiment=mixture", "rollout.prioritize=true", "train.max_steps=6", "train.save_steps=3"]
OVERRIDES += ["train.per_device_train_batch_size=24", "train.num_generations=4", "task.tasks.brief.task.eval.size=9"]
OVERRIDES += ["task.tasks.problems.task.eval.size=12", "task.tasks.brief.train.max_completion_length=12"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, `run`, and of another that has continued it, `again`."""
    where = tmp_path_factory.mktemp("mixture")
    done = command("grpo.train", *OVERRIDES, "hydra.run.dir=run", cwd=where)
    assert done.returncode == 0, done.stderr
    assert "2560 problems to train on in brief\n" in done.stderr
    return where


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_each_task_is_evaluated_with_its_own_problems(folder: Path) -> None:
    after = json.loads((folder / "run" / "evaluation.json").read_text())["after"]
    parts = after["by_task"]
    assert (after["samples"], parts["problems"]["samples"], parts["brief"]["samples"]) == (21, 12, 9)
    assert after["correct"] == sum(part["correct"] for part in parts.values())
    assert parts["brief"]["decoding"]["max_new_tokens"] == 12 < after["decoding"]["max_new_tokens"] == 24
    lines = [json.loads(line) for line in (folder / "run" / "evaluation_after.jsonl").read_text().splitlines()]
    assert sorted(line["problem"] for line in lines) == list(range(21))
    assert [line["task"] for line in lines].count("brief") == 9
    assert sum(line["correct"] for line in lines) == after["correct"]
    assert not list((folder / "run").glob("evaluation_after_*.jsonl"))


def test_metrics_and_completions_are_told_apart_by_task(folder: Path) -> None:
    rows = rows_of(folder / "run")
    for row in rows:
        assert row["rollout/groups/problems"] + row["rollout/groups/brief"] == row["rollout/groups_generated"] == 6
        groups = [row[f"rollout/groups/{name}"] for name in ("problems", "brief")]
        means = [row[f"reward/{name}"] for name in ("problems", "brief")]
        assert row["reward"] == pytest.approx(sum(a * b for a, b in zip(groups, means, strict=True)) / 6, abs=1e-6)
        assert row["accuracy/problems"] == pytest.approx(row["reward/problems"])
    table = pandas.read_parquet(folder / "run" / "completions" / "completions_00001.parquet")
    assert table.groupby("task")["brevity"].apply(lambda values: values.isna().all()).to_dict() == {
        "problems": True,
        "brief": False,
    }
    assert table.loc[table["task"] == "brief", "completion_tokens"].max() <= 12 < table["completion_tokens"].max()


def test_the_page_shows_each_task(folder: Path) -> None:
    report = json.loads((folder / "run" / "report.json").read_text())
    lines = {curve["title"]: set(curve["lines"]) for curve in report["curves"]}
    for title in ("Accuracy by task", "Reward by task", "Zero-variance groups by task"):
        assert lines[title] == {"problems", "brief"}
    assert report["settings"]["prompts by task"] == "problems × 2, brief × 1"
    assert report["evaluation"]["after"]["by_task"].keys() == {"problems", "brief"}


@pytest.mark.slow
@pytest.mark.long
def test_a_mixture_continues_bit_for_bit(folder: Path) -> None:
    checkpoint = "train.resume_from_checkpoint=run/checkpoint-3"
    done = command("grpo.train", *OVERRIDES, checkpoint, "hydra.run.dir=again", cwd=folder)
    assert done.returncode == 0, done.stderr
    machine = ("time/", "memory/", "step_time")
    whole, again = (
        [{name: value for name, value in row.items() if not name.startswith(machine)} for row in rows_of(folder / run)]
        for run in ("run", "again")
    )
    assert again == whole[3:]
    expected, found = (load_file(folder / run / "model" / "model.safetensors") for run in ("run", "again"))
    assert all(weight.equal(found[name]) for name, weight in expected.items())


@pytest.mark.slow
@pytest.mark.long
def test_other_weights_are_another_run(folder: Path) -> None:
    given = ["task.tasks.brief.weight=3", "train.resume_from_checkpoint=auto", "hydra.run.dir=run"]
    done = command("grpo.train", *OVERRIDES, *given, cwd=folder)
    assert done.returncode == 2
    assert "task.tasks.brief.weight=1.0 instead of 3.0" in done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_a_mixture_is_forecast_and_evaluated(folder: Path) -> None:
    done = command("grpo.evaluate", "run", "evaluate.samples=2", cwd=folder)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "run" / "evaluate" / "evaluation.json").read_text())
    known = json.loads((folder / "run" / "evaluation.json").read_text())["after"]["by_task"]
    assert {name: part["correct"] for name, part in result["by_task"].items()} == {
        name: part["correct"] for name, part in known.items()
    }
    sizes = ["preflight.problems=12", "preflight.samples=4", "preflight.format=json", "hydra.run.dir=forecast"]
    done = command("grpo.preflight", "+experiment=mixture", *sizes, cwd=folder)
    forecast = json.loads(done.stdout)
    assert forecast["accuracy"]["value"] > 0, done.stderr


@pytest.mark.slow
@pytest.mark.long
def test_tools_of_a_task_are_not_those_of_another(tmp_path: Path) -> None:
    words = ["+task@task.tasks.words=arithmetic", "task.tasks.words.task.conversational=true"]
    tasks = ["model=tiny_calculator", "task=mixture", "+task@task.tasks.calls=calculator", *words]
    sizes = ["task.tasks.calls.task.eval.size=4", "task.tasks.words.task.eval.size=4", "hydra.run.dir=run"]
    sizes += ["train.max_steps=2", "train.per_device_train_batch_size=16", "train.gradient_accumulation_steps=2"]
    done = command("grpo.train", *tasks, *sizes, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    called = Counter[tuple[str, str]]()
    for file in (tmp_path / "run" / "completions").glob("completions_*.parquet"):
        for _, row in pandas.read_parquet(file).iterrows():
            results = [message["content"] for message in row["completion"] if message["role"] == "tool"]
            called += Counter((row["task"], "fails" if "error" in result else "answers") for result in results)
            assert row["completion_tokens"] <= (24 if row["task"] == "words" and not results else 64)
    assert called["calls", "answers"] > 0 == called["words", "answers"]
