"""Runs beside each other: configurations, accuracies, curves and answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from grpo.config.schema import ROOT
from grpo.reporting import comparison
from grpo.reporting.comparison import comparison_of
from grpo.reporting.completions import as_data
from grpo.reporting.page import named, write_comparison
from grpo.rundir.run_dir import read_run
from grpo.utils.errors import ConfigError
from tests.page_fixtures import write_run

SIZE = {"steps": 4, "groups": 1, "generations": 2}


def evaluated(folder: Path, correct: list[bool], prompt: str = "question {}") -> Path:
    """Give a run answers to held-out problems."""
    rows = [
        {
            "key": str(place),
            "problem": place,
            "sample": 0,
            "prompt": prompt.format(place),
            "completion": f"{is_correct}",
        }
        for place, is_correct in enumerate(correct)
    ]
    lines = [json.dumps(row | {"correct": is_correct}) for row, is_correct in zip(rows, correct, strict=True)]
    (folder / "evaluation_after.jsonl").write_text("".join(f"{line}\n" for line in lines))
    part = {"accuracy": sum(correct) / len(correct), "correct": sum(correct), "samples": len(correct)}
    (folder / "evaluation.json").write_text(json.dumps({"after": part | {"interval": [0.0, 1.0], "decoding": {}}}))
    return folder


@pytest.fixture
def runs(composed: Any, tmp_path: Path) -> dict[str, Path]:
    """Two runs that differ in seed and rate, the second of which is better."""
    first = write_run(tmp_path / "a", **SIZE)
    second = write_run(tmp_path / "b", typed=("train.seed=4", "train.learning_rate=0.5"), **SIZE)
    evaluated(first, [True] * 20 + [False] * 80)
    evaluated(second, [True] * 60 + [False] * 40)
    return {"a": first, "b": second}


def compared(runs: dict[str, Path], to: str | None = None) -> dict[str, Any]:
    return comparison_of({name: read_run(folder) for name, folder in runs.items()}, to)


def test_settings_that_differ_are_listed(runs: dict[str, Path]) -> None:
    found = compared(runs)["settings"]
    assert found["train.seed"] == ["3", "4"]
    assert found["train.learning_rate"][1] == "0.5"
    assert all(key.startswith("train.") for key in found)
    summary = json.loads((runs["a"] / "summary.json").read_text())
    (runs["a"] / "summary.json").write_text(json.dumps(summary | {"versions": {"trl": "1.16.0"}, "git_commit": "abc"}))
    found = compared(runs)["settings"]
    assert found["version of trl"] == ["1.16.0", ""]
    assert found["commit"] == ["abc", ""]


def test_a_difference_in_accuracy_has_an_interval_of_pairs(runs: dict[str, Path]) -> None:
    (one,) = compared(runs)["differences"]
    assert (one["run"], one["to"], one["paired"], one["points"]) == ("b", "a", True, pytest.approx(0.4))
    assert 0.28 < one["interval"][0] < 0.4 < one["interval"][1] < 0.52
    (text,) = compared(runs)["accuracies"]
    assert text.startswith("The accuracy of b is 40.0 points higher than that of a, on the same 100 problems; 95 % ")
    assert text.endswith("more than chance explains")
    assert compared(runs, to="b")["accuracies"][0].startswith("The accuracy of a is 40.0 points lower")


def test_other_problems_are_no_pairs(runs: dict[str, Path]) -> None:
    evaluated(runs["b"], [True] * 22 + [False] * 78, prompt="another {}")
    found = compared(runs)
    assert not found["differences"][0]["paired"]
    assert "on other problems" in found["accuracies"][0]
    assert found["accuracies"][0].endswith("chance may explain it")
    assert found["answers"]["problems"] == []


def test_a_run_that_was_not_evaluated_has_no_difference(runs: dict[str, Path]) -> None:
    (runs["b"] / "evaluation.json").unlink()
    (runs["b"] / "evaluation_after.jsonl").unlink()
    assert compared(runs)["accuracies"] == []
    assert compared(runs)["answers"] == {"problems": [], "others": 0}


def test_each_curve_has_a_line_per_run(runs: dict[str, Path]) -> None:
    found = {one["title"]: one for one in compared(runs)["curves"]}
    assert {"Accuracy", "Reward", "Completion length, tokens", "Time, s/step"} <= found.keys()
    assert all(list(one["lines"]) == ["a", "b"] for one in found.values())
    assert [step for step, _ in found["Reward"]["lines"]["a"]] == [1, 2, 3, 4]


def test_answers_that_differ_come_first_as_many_as_fit(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(runs)["answers"]
    assert len(found["problems"]) == 100
    differ = [len({one["correct"] for one in row["answers"]}) == 2 for row in found["problems"]]
    assert differ == [True] * 40 + [False] * 60
    assert found["problems"][0] == {
        "problem": 20,
        "prompt": "question 20",
        "answers": [{"run": "a", "text": "False", "correct": False}, {"run": "b", "text": "True", "correct": True}],
    }
    monkeypatch.setattr(comparison, "MAX_SIZE", 2000)
    few = compared(runs)["answers"]
    assert len(few["problems"]) + few["others"] == 100
    assert len(as_data(few["problems"]).encode()) < 2500


def test_runs_are_named_by_their_folders(runs: dict[str, Path], tmp_path: Path) -> None:
    assert list(named([runs["a"], runs["b"]])) == [f"{tmp_path.name}/a", f"{tmp_path.name}/b"]
    other = write_run(tmp_path / "c" / tmp_path.name / "a", **SIZE)
    assert list(named([runs["a"], other])) == [str(runs["a"]), str(other)]
    with pytest.raises(ConfigError, match="7 runs: at most 6 can be compared"):
        named([runs["a"]] * 7)
    with pytest.raises(ConfigError, match="a run is named twice"):
        named([runs["a"], runs["a"]])
    (runs["b"] / "preflight.json").write_text("{}")
    with pytest.raises(ConfigError, match="b: a preflight, no run"):
        named(list(runs.values()))


def test_the_page_of_a_comparison_shows_all_of_it(runs: dict[str, Path], tmp_path: Path) -> None:
    text = write_comparison(named(list(runs.values())), tmp_path).read_text()
    for shown in ("train.learning_rate", "40.0 points higher", "question 20", "train.seed=4"):
        assert shown in text


def test_the_command_compares_several_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    line = [sys.executable, "-m", "grpo.report", *map(str, runs.values())]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "comparison.html"
    assert (tmp_path / "comparison.html").is_file()
    done = subprocess.run([*line, "--text"], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert "train.learning_rate" in done.stdout
    assert "more than chance explains" in done.stdout


def test_equal_runs_differ_in_nothing(runs: dict[str, Path]) -> None:
    OmegaConf.save(read_run(runs["a"]).config, runs["b"] / ".hydra" / "config.yaml")
    assert compared(runs)["settings"] == {}
