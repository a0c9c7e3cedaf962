"""The problems of several tasks as one data set, and the columns that rewards of each task can use."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo.data.mixture import load_problems
from grpo.data.rewards import usable_columns
from grpo.data.task import reward_columns
from grpo.utils.errors import ConfigError

Compose = Callable[..., DictConfig]
TWO = ["task=mixture", "+task@task.tasks.words=arithmetic", "+task@task.tasks.sums=sums"]
SMALL = ["task.tasks.words.task.dataset.size=20", "task.tasks.sums.task.eval.size=3"]


def of_file(folder: Path, name: str, *rows: dict[str, Any]) -> list[str]:
    """Overrides for a task whose data are these rows, and nothing held out."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = f"task.tasks.{name}.task"
    return [f"+task@task.tasks.{name}=jsonl", f"{own}.dataset.path={file}", f"{own}.eval.size=0", f"{own}.split=train"]


def test_tasks_become_one_data_set_with_their_names(composed: Compose) -> None:
    problems = load_problems(composed(*TWO, *SMALL).task)
    assert len(problems.train) == 20 + 2000
    assert problems.train["task"][19:21] == ["words", "sums"]
    assert (problems.train[0]["carried"], problems.train[20]["steps"]) == (None, None)
    assert problems.train[0]["steps"] is not None
    assert problems.train[20]["prompt"].startswith("59 + 63 = 122\n")
    assert problems.held_out is not None
    assert [problems.held_out["task"].count(name) for name in ("words", "sums")] == [20, 3]
    assert problems.counts["train"]["used"] == problems.counts["words/train"]["used"] + 2000
    assert str(problems).splitlines()[:2] == ["20 problems to train on in words", "20 problems held out in words"]
    assert load_problems(composed(*TWO, *SMALL, "task.eval.size=0").task).held_out is None


def test_what_a_task_holds_out_no_task_trains_on(composed: Compose) -> None:
    one, other = (f"+task@task.tasks.{name}=arithmetic" for name in ("one", "other"))
    size, own = "task.tasks.one.task.dataset.size=20", "task.tasks.other.task"
    tested = [f"{own}.eval.split=train", f"{own}.eval.size=4", "task.tasks.one.task.eval.size=0"]
    problems = load_problems(composed("task=mixture", one, other, size, *tested).task)
    assert problems.held_out is not None
    assert not {*problems.train["question"]} & {*problems.held_out["question"]}
    for name in ("one/train", "other/train"):
        counts = problems.counts[name]
        assert (counts["held_out"], counts["used"]) == (4, counts["rows"] - 4)
    with pytest.raises(ConfigError, match=r"^task\.tasks\.one\.task: nothing left of train: 4 of 4 rows that"):
        load_problems(composed("task=mixture", one, other, size.replace("20", "4"), *tested).task)


def test_a_reward_gets_the_columns_of_all_its_tasks(composed: Compose) -> None:
    both = ["+reward@reward=brevity", "task.tasks.sums.rewards=[correctness]"]
    task = composed(*TWO, *SMALL, *both, "task.tasks.words.task.answer.column=null").task
    problems = load_problems(task)
    found = usable_columns(task, ["correctness", "brevity"], reward_columns(problems.train), problems.columns)
    assert "answer" not in found["correctness"]
    assert {"steps", "question"} <= set(found["brevity"])
    assert "steps" not in found["correctness"]


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"level": 1}, {"level": "a"}, "the column level is string in b and int64 in a"),
        ({"task": "x"}, {}, r"task\.tasks\.a\.task: the data has a column task"),
    ],
)
def test_columns_that_collide_are_one_line(
    composed: Compose, tmp_path: Path, one: dict[str, Any], other: dict[str, Any], reason: str
) -> None:
    rows = [{"question": "2 + 3?", "answer": "5"} | more for more in (one, other)]
    files = [*of_file(tmp_path, "a", rows[0]), *of_file(tmp_path, "b", rows[1])]
    with pytest.raises(ConfigError, match=reason):
        load_problems(composed("task=mixture", *files).task)


def test_a_column_without_values_collides_with_none(composed: Compose, tmp_path: Path) -> None:
    rows = [{"question": "2 + 3?", "answer": "5", "level": level} for level in (None, 3)]
    files = [*of_file(tmp_path, "a", rows[0]), *of_file(tmp_path, "b", rows[1])]
    assert load_problems(composed("task=mixture", *files).task).train["level"] == [None, 3]


def test_an_error_of_a_task_names_the_task(composed: Compose) -> None:
    with pytest.raises(ConfigError, match=r"task\.tasks\.sums\.task: the data has no column nothing"):
        load_problems(composed(*TWO, *SMALL, "task.tasks.sums.task.answer.column=nothing").task)
