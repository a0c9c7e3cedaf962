"""The prompts of rows, of every form that a person reads, and the one-line errors of the others."""

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import DictConfig

from grpo.data.prompts import messages_of, prompts_from
from grpo.utils.errors import ConfigError

Composed = Callable[..., DictConfig]
ROW = {"question": "q?", "answer": "1", "meta": {"k": {"z": "v"}, "none": None}, "options": ["a", "b"], "context": ""}
USER = {"role": "user", "content": "q?"}
GIVEN = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "Be brief."}


def prompt(composed: Composed, row: dict[str, Any], *overrides: str) -> Any:
    return prompts_from(composed("task=jsonl", *overrides).task, row)(row)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (r"{question} Answer in \boxed{}.", r"q? Answer in \boxed{}."),
        (r"{question} \text{word} \frac{1}{2}", r"q? \text{word} \frac{1}{2}"),
        ('{question} as {"answer": 5}', 'q? as {"answer": 5}'),
        ("{question} {{answer}}", "q? {answer}"),
        (r"{question} \boxed{{{answer}}}", r"q? \boxed{1}"),
        ("{meta.k.z} {meta[k][z]} {options[1]}", "v v b"),
        ("{context}{question:>4}", "  q?"),
    ],
)
def test_braces_hold_columns_and_their_fields_or_are_text(composed: Composed, template: str, text: str) -> None:
    assert prompt(composed, ROW, f"task.prompt='{template}'", "task.conversational=false") == text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{meta.no} {question}", "no field 'no'"),
        ("{options[7]}", "list index out of range"),
        ("{question:d}", "format code 'd'"),
        ("{question.k}", "string indices"),
        (r"\boxed{answer} {question}", r"write \boxed{{{answer}}} for the column, or \boxed{{answer}} for this text"),
    ],
)
def test_a_field_that_is_missing_or_unsuitable_is_named(composed: Composed, template: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prompt(composed, ROW, f"task.prompt='{template}'")
    assert says in str(caught.value)
    assert str(caught.value).startswith("task.prompt=")
    assert "\n" not in str(caught.value)


def test_braces_of_examples_are_text_too(composed: Composed) -> None:
    shots = ["task.few_shot.examples=[{question: '1+1?', answer: 2}]", r"task.few_shot.completion='So \boxed{}'"]
    assert prompt(composed, ROW, *shots)[1] == {"role": "assistant", "content": r"So \boxed{}"}


@pytest.mark.parametrize(
    "value",
    [
        [USER],
        [USER, GIVEN],
        [{"from": "human", "value": "q?"}, {"from": "gpt", "value": "a"}],
        [{"role": "user", "content": None, "from": None, "value": "q?"}],
        [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]}],
        USER,
        '[{"role": "user", "content": "q?"}]',
        "[{'role': 'user', 'content': 'q?'}]",
    ],
)
def test_messages_of_every_form_are_read_without_the_answer(composed: Composed, value: Any) -> None:
    for template in ("task.prompt=chat", "task.prompt='{chat}'"):
        assert prompt(composed, {"chat": value}, template) == [USER]


def test_the_datas_system_message_replaces_the_tasks(composed: Composed) -> None:
    line = ("task.prompt=chat", "task.system_prompt=Think.")
    assert prompt(composed, {"chat": [SYSTEM, USER]}, *line) == [SYSTEM, USER]
    assert prompt(composed, {"chat": [USER]}, *line) == [{"role": "system", "content": "Think."}, USER]


@pytest.mark.parametrize("value", [["a", "b"], [1, 2], {"text": "q?"}, [{"role": "user"}], [{"content": "q?"}]])
def test_a_list_that_holds_no_messages_is_one_line(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^task\.prompt=chat: a list of messages with `role` and `content`"):
        messages_of(value, "chat")


@pytest.mark.parametrize("value", [None, "", "  ", [], [GIVEN], [SYSTEM], [{"role": "user", "content": None}]])
def test_a_row_without_a_question_has_no_prompt(composed: Composed, value: Any) -> None:
    assert prompt(composed, {"chat": value}, "task.prompt=chat") is None
    assert prompt(composed, ROW, "task.prompt='{meta.none} {question}'") is None


def test_a_prompt_without_a_column_is_kept_for_an_environment(composed: Composed) -> None:
    environment = "task.environment=examples/environments/word_game.py:Calculator"
    assert prompt(composed, ROW, "task.prompt=''", environment) == [{"role": "user", "content": ""}]
    assert prompt(composed, ROW, "task.prompt='{context}'", environment) is None
    assert prompt(composed, ROW, "task.prompt=''") is None, "nobody asks"
