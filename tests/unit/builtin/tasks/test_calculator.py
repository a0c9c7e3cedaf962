"""The built-in task with a tool: its problems, and the calculator."""

from itertools import islice

import pytest

from grpo.builtin.tasks.calculator import LARGEST, calculator, problems, rows


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2", "3"),
        (" (412 + 367) * 4 ", "3116"),
        ("7 / 2", "3.5"),
        ("-3 - -5", "2"),
        ("1 / 3", "0.3333333333"),
        ("6 / 3", "2"),
        ("0.1 + 0.2", "0.3"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "a",
        "2 ** 9",
        "__import__('os')",
        "True + 1",
        "'a' * 9",
        "1 +",
        "(1, 2)",
        "1 if 1 else 2",
        "1" * 201,
        "1 / 0",
    ],
)
def test_the_calculator_refuses_all_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)


def test_answers_follow_from_expressions_and_splits_share_none() -> None:
    some = {split: list(islice(problems(split, seed=3), 300)) for split in ("train", "test")}
    for problem in [*some["train"], *some["test"]]:
        assert 100 <= int(problem.answer) <= LARGEST
        assert all(
            number in problem.question
            for number in problem.expression.replace("(", "").split()[::2]
            if number[-1] != ")"
        )
        assert problem.steps == sum(problem.expression.count(sign) for sign in "+-*")
    assert not {one.expression for one in some["train"]} & {one.expression for one in some["test"]}
    assert rows("test", 2, seed=3) == [
        {"question": one.question, "answer": one.answer, "steps": one.steps} for one in some["test"][:2]
    ]
