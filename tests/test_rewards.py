import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.correctness import correctness, final_answer, same
from rewards.loader import load


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("2 + 3 = 5\n#### 5", "5"),
        ("#### 4\n#### 5", "5"),
        ("#### 5 \nand so on 7", "5"),
        (r"so \boxed{5}.", "5"),
        ("It is 3, no, 5", "5"),
        ("That is $1,000.50 in all", "$1,000.50"),
        ("it is -5.", "-5"),
        ("####", ""),
        ("nothing", ""),
    ],
)
def test_the_final_answer_is_found(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    ("answer", "reference"), [("1,000", "1000"), ("$18.00", "18"), ("5.", "5"), ("x + 1", "x + 1")]
)
def test_the_same_answer_written_otherwise_counts(answer: str, reference: str) -> None:
    assert same(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), [("", "5"), ("51", "5"), ("5 7", "5"), ("NaN", "NaN5"), ("-5", "5")])
def test_another_answer_does_not_count(answer: str, reference: str) -> None:
    assert not same(answer, reference)


@given(st.integers(-(10**9), 10**9))
def test_a_number_is_right_exactly_when_it_is_the_reference(number: int) -> None:
    completions = [f"#### {number}", f"#### {number:,}", f"#### {number + 1}", ""]
    assert correctness(completions, [str(number)] * 4) == [1, 1, 0, 0]


def test_conversational_completions_are_read_from_their_last_message() -> None:
    assert correctness([[{"role": "assistant", "content": "#### 5"}]], ["5"]) == [1]


MINE = """
def brevity(completions, limit=10, **columns):
    return [float(len(text) <= limit) for text in completions]

async def slow(completions, **columns):
    return [1.0 for _ in completions]
"""


def test_a_reward_loads_from_a_file_under_the_name_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    reward = load(f"{file}:brevity", "short", {"limit": 3})
    assert reward.__name__ == "short"
    assert reward(completions=["abc", "abcd"], answer=["1", "2"]) == [1, 0]


def test_an_async_reward_stays_async(tmp_path: Path) -> None:
    from trl.trainer.utils import is_async_callable

    file = tmp_path / "mine.py"
    file.write_text(MINE)
    reward = load(f"{file}:slow", "slow")
    assert is_async_callable(reward)
    assert asyncio.run(reward(completions=["a"])) == [1.0]


def test_a_reward_loads_from_a_module() -> None:
    assert load("rewards.correctness.correctness", "correctness")(completions=["5"], answer=["5"]) == [1]


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        ("brevity", "write package.module.function or path/to/file.py:function"),
        ("missing.py:f", "there is no file"),
        ("rewards/correctness.py", "path/to/file.py:function"),
        ("rewards.nothing.f", "No module named 'rewards.nothing'"),
        ("rewards.correctness.correct", "it has: "),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_explained(fn: str, says: str) -> None:
    with pytest.raises(ValueError, match=r"reward\.mine\.fn=") as caught:
        load(fn, "mine")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_syntax_error_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\ndef f(completions)\n    return 1\n")
    with pytest.raises(ValueError, match=r"SyntaxError: expected ':' \(.*mine.py, line 2\)"):
        load(f"{file}:f", "mine")


def test_a_file_that_breaks_on_import_is_named_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("x = 1\nimport not_there\n")
    with pytest.raises(ValueError, match=r"ModuleNotFoundError: No module named 'not_there' .*mine.py, line 2"):
        load(f"{file}:f", "mine")
