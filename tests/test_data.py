import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from grpo.config import ConfigError
from grpo.data import load_task

ROWS = [
    {"question": "2 + 3?", "answer": "First.\n#### 5", "level": 1},
    {"question": "1,000?", "answer": "#### 1,000", "level": 2},
    {"question": "{braces}?", "answer": "#### 7", "level": 3},
    {"question": "unanswered", "answer": "nothing", "level": 4},
]


@pytest.fixture
def local(tmp_path: Path) -> list[str]:
    """Overrides that point `task=gsm8k` at a local file."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [
        "task=gsm8k",
        "task.dataset.path=json",
        "task.dataset.name=null",
        f"+task.dataset.data_files={file}",
        "task.eval.split='train[:2]'",
    ]


def test_the_embedded_task_has_prompts_and_answers(composed: Callable[..., DictConfig]) -> None:
    train, held_out = load_task(composed("task.dataset.size=20", "task.eval.size=10").task)
    assert (len(train), len(held_out)) == (20, 10)
    assert train[0]["prompt"] == train[0]["question"] + "\n"
    assert not set(train["question"]) & set(held_out["question"])


def test_a_local_file_in_the_format_of_gsm8k_is_read(composed: Callable[..., DictConfig], local: list[str]) -> None:
    task = composed(*local).task
    train, held_out = load_task(task)
    assert train["answer"] == ["5", "1,000", "7"]  # the row without an answer is left out
    assert train["level"] == [1, 2, 3]  # rewards get every column
    assert train[0]["prompt"] == [
        {"role": "system", "content": task.system_prompt},
        {"role": "user", "content": "2 + 3?"},
    ]
    assert train[2]["prompt"][1]["content"] == "{braces}?"
    assert len(held_out) == 2


def test_a_plain_prompt_begins_with_the_system_prompt(composed: Callable[..., DictConfig], local: list[str]) -> None:
    task = composed(*local, "task.conversational=false").task
    assert load_task(task)[0][0]["prompt"] == f"{task.system_prompt}\n\n2 + 3?"


def test_without_evaluation_no_split_is_held_out(composed: Callable[..., DictConfig], local: list[str]) -> None:
    assert load_task(composed(*local, "task.eval.size=0", "task.eval.split=nothing").task)[1] is None


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("task.dataset.data_files=missing.jsonl", "Unable to find"),
        ("task.split=test", 'Unknown split "test"'),
        ("task.prompt='{query}'", "no column query; it has: question, answer, level"),
        ("task.answer.column=solution", "no column solution"),
        ("task.answer.pattern='=> (.*)'", "matches no row"),
        ("task.answer.pattern='=> (.*'", "missing ), unterminated"),
        ("task.answer.pattern='=> .*'", "in parentheses"),
        ("task.prompt='{question'", "task.prompt or task.answer.pattern: expected '}'"),
        ("task.dataset.path=rows.jsonl", "task.dataset.path=json"),
        ("task.split='train[:0]'", "no data"),
    ],
)
def test_what_is_wrong_with_the_data_is_one_line(
    composed: Callable[..., DictConfig], local: list[str], override: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(composed(*local, override).task)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_is_one_line(composed: Callable[..., DictConfig], local: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ConfigError, match="there are no rows in it"):
        load_task(composed(*local).task)


def test_a_broken_file_is_one_line(composed: Callable[..., DictConfig], local: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": \n')
    with pytest.raises(ConfigError, match="JSON parse error") as caught:
        load_task(composed(*local).task)
    assert "\n" not in str(caught.value)


def test_a_generator_of_no_rows_is_one_line(composed: Callable[..., DictConfig]) -> None:
    with pytest.raises(ConfigError, match="there are no rows in it"):
        load_task(composed("task.dataset.size=0").task)
