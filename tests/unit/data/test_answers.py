"""The text of reference answers."""

from typing import Any

import pytest

from grpo.data.answers import answer_text, final
from grpo.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        ([], ""),
        (0.00001, "0.00001"),
        (-2.5, "-2.5"),
        (3.0, "3"),
        (1e16, "10000000000000000"),
        (1e300, "1E+300"),
        (True, "True"),
        (["4"], "4"),
        ([[1, 2], [3, 4.5]], "[[1, 2], [3, 4.5]]"),
    ],
)
def test_a_value_is_an_answer_as_people_write_it(value: Any, text: str) -> None:
    assert answer_text({"answer": value}, "answer") == text


@pytest.mark.parametrize(
    ("value", "column", "says"),
    [
        (
            {"ground_truth": "4"},
            "answer",
            "a dictionary, {'ground_truth': '4'}; name a field, as in answer.g",
        ),
        (["4", "four"], "answer", "name a member, as in answer[0]"),
        ({"a": 1}, "answer.b", "no field 'b'"),
        (12345678901234567890.0, "answer", "1.23457e+19 has lost digits"),
    ],
)
def test_a_value_that_is_no_answer_is_one_line(value: Any, column: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        answer_text({"answer": value}, column)
    assert str(caught.value).startswith(f"task.answer.column={column}: ")
    assert says in str(caught.value)


def test_an_answer_may_be_a_field_of_a_column() -> None:
    row = {"reward_model": {"style": "rule", "ground_truth": "4"}, "all": ["4", "four"]}
    assert answer_text(row, "reward_model.ground_truth") == answer_text(row, "all[0]") == "4"


def test_a_group_that_does_not_take_part_is_no_answer() -> None:
    assert final("x", "x(y)?") == ""
