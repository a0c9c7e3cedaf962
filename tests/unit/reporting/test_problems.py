"""Problems through the steps of a run: how often they were asked, when they were solved, and what was answered."""

from pathlib import Path
from typing import Any

import pandas
import pytest

from grpo.reporting import problems
from grpo.reporting.completions import as_data
from grpo.reporting.problems import problems_of

WEIGHTS = {"correct": 1.0, "brief": 0.1}


def write(folder: Path, step: int, answers: dict[str, list[float | None]], **columns: Any) -> None:
    """Write the completions of a step: for each prompt which of them are correct."""
    (folder / "completions").mkdir(exist_ok=True)
    rows = [(prompt, value, place) for prompt, values in answers.items() for place, value in enumerate(values)]
    table = {
        "step": [step] * len(rows),
        "prompt": [prompt for prompt, _, _ in rows],
        "completion": [f"{prompt} {place} at {step}" for prompt, _, place in rows],
        "correct": [value for _, value, _ in rows],
        "brief": [0.5] * len(rows),
        "completion_tokens": [step + place for _, _, place in rows],
        **columns,
    }
    pandas.DataFrame(table).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def found(folder: Path, grader: str = "correct", reused: bool = False) -> dict[str, Any]:
    return problems_of(folder, WEIGHTS, grader, reused)


def test_a_problem_is_followed_through_the_steps(tmp_path: Path) -> None:
    write(tmp_path, 1, {"a": [0.0, 0.0], "b": [1.0, 0.0]})
    write(tmp_path, 2, {"c": [0.0, 0.0], "a": [0.0, 1.0]})
    write(tmp_path, 5, {"a": [1.0, None], "b": [0.0, 0.0]})
    a, b = found(tmp_path)["problems"]
    assert (a["prompt"], a["asked"], a["solved"], a["forgotten"]) == ("a", 3, 2, None)
    assert [(time["step"], time["value"], time["size"]) for time in a["times"]] == [(1, 0, 2), (2, 0.5, 2), (5, 1, 2)]
    assert (b["prompt"], b["asked"], b["solved"], b["forgotten"]) == ("b", 2, 1, 5)
    assert found(tmp_path)["others"] == 1
    assert a["times"][1]["best"] == {"row": 3, "reward": 1.05, "correct": True, "text": "a 1 at 2"}
    assert a["times"][1]["worst"] == {"row": 2, "reward": 0.05, "correct": False, "text": "a 0 at 2"}


def test_a_problem_is_forgotten_since_it_was_last_solved(tmp_path: Path) -> None:
    for step, value in enumerate([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], 1):
        write(tmp_path, step, {"a": [value]})
    (a,) = found(tmp_path)["problems"]
    assert (a["solved"], a["forgotten"]) == (2, 5)


def test_completions_that_are_logged_again_count_once(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, {"a": [0.0, 1.0]}, completion_tokens=[4, 5 + (step == 3)])
    assert found(tmp_path, reused=True)["problems"][0]["asked"] == 2
    assert found(tmp_path, reused=False)["problems"][0]["asked"] == 3


def test_without_a_grader_problems_are_followed_by_reward(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, {"a": [0.0, 1.0]})
    result = found(tmp_path, grader="another")
    assert result["measure"] == "reward"
    assert [time["value"] for time in result["problems"][0]["times"]] == [0.55, 0.55]
    assert result["problems"][0]["solved"] is None


def test_a_problem_without_any_reward_has_no_value(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, {"a": [None, None]}, brief=[None, None])
    assert found(tmp_path)["problems"] == []


def test_problems_with_other_images_are_others(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step, {"a": [0.0, 0.0, 1.0]}, thumbnails=[["x.jpg"], ["x.jpg"], ["y.jpg"]])
    assert [one["times"][0]["size"] for one in found(tmp_path)["problems"]] == [2, 1]


def test_a_long_run_has_some_times_of_some_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "MOST", 3)
    monkeypatch.setattr(problems, "MAX_TIMES", 5)
    for step in range(1, 21):
        write(tmp_path, step, {f"{letter}": [0.0] for letter in "abcdef"[: 6 if step > 10 else 2]})
    result = found(tmp_path)
    assert [one["asked"] for one in result["problems"]] == [20, 20, 10]
    assert [time["step"] for time in result["problems"][0]["times"]] == [1, 6, 11, 15, 20]
    assert result["others"] == 3


def test_the_completions_of_problems_fit_on_a_page(tmp_path: Path) -> None:
    for step in range(1, 31):
        answers = {f"{place} {'long ' * 500}": [0.0, 1.0] for place in range(100)}
        write(tmp_path, step, answers, completion=["<" * 5000] * 200)
    result = found(tmp_path)
    with_texts = [one for one in result["problems"] if "best" in one["times"][-1]]
    assert 0 < len(with_texts) < len(result["problems"])
    assert len(as_data(result).encode()) < 2 * problems.MAX_SIZE


def test_a_torn_file_loses_its_step_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, {"a": [0.0]})
    file = tmp_path / "completions" / "completions_00002.parquet"
    file.write_bytes(file.read_bytes()[:50])
    assert found(tmp_path)["problems"][0]["asked"] == 2
