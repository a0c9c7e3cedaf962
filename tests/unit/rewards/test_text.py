from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.text import final_answer, numbers, plain, text_of


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("2 + 3 = 5\n#### 5", "5"),
        ("#### 4\n#### 5", "5"),
        ("#### 5 \nand so on 7", "5"),
        (r"so \boxed{5}.", "5"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\sqrt{\frac{1}{2}}} is it", r"\sqrt{\frac{1}{2}}"),
        ("<answer>\n 5 \n</answer>", "5"),
        ("It is 3, no, 5", "5"),
        ("That is $1,000.50 in all", "$1,000.50"),
        ("it is -5.", "-5"),
        ("7-5", "5"),
        ("he eats 1/2.", "1/2"),
        ("it is 3 1/2", "3 1/2"),
        ("3½", "3 1/2"),
        ("10² = 100", "100"),
        ("####", ""),
        ("nothing", ""),
        ("", ""),
    ],
)
def test_the_final_answer_is_found(completion: str, answer: str) -> None:
    assert final_answer(completion) == answer


def test_only_the_chosen_kinds_of_answer_are_found_in_order() -> None:
    text = r"#### 1 and \boxed{2} and 3"
    assert final_answer(text, ["boxed", "hash"]) == "2"
    assert final_answer("the answer is 3", ["hash", "boxed", "answer"]) == ""


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("1,000", 1000),
        ("1 000", 1000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("$18.00", 18),
        (r"\$18", 18),
        ("-$5", -5),
        ("$-5", -5),
        ("€7", 7),
        ("18 dollars", 18),
        ("5 apples", 5),
        ("5 square metres", 5),
        ("**5**", 5),
        ("5.", 5),
        (".5", Fraction(1, 2)),
        ("1/2", Fraction(1, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("3 1/2", Fraction(7, 2)),
        ("½", Fraction(1, 2)),
        ("3½", Fraction(7, 2)),
        ("−5", -5),
        ("５", 5),
        ("٣٤", 34),
        ("+5", 5),
    ],
)
def test_a_number_is_read_however_it_is_written(answer: str, value: int | Fraction) -> None:
    assert numbers(answer) == (value,)


@pytest.mark.parametrize("answer", ["50%", "50 %", "50 percent", r"50\%"])
def test_percent_may_be_the_number_or_the_share(answer: str) -> None:
    assert numbers(answer) == (50, Fraction(1, 2))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "5x",
        "3i",
        "2π",
        "2 pi",
        "2 x",
        "5 minus three",
        "5 million",
        "5 or six",
        "5 or 6",
        "4 and 5 apples in 2 bags",
        "1,00",
        "1.5e3",
        "0x1",
        "5:30",
        "1/0",
        "²",
        "x",
        "1" * 10_000,
    ],
)
def test_what_is_not_one_number_is_not_read_as_one(answer: str) -> None:
    assert numbers(answer) == ()


@given(st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=1000))
def test_every_fraction_is_read_as_itself(value: Fraction) -> None:
    assert numbers(str(value)) == (value,)


@given(st.integers(-(10**12), 10**12), st.sampled_from(["", " ", " kg", " litres each day", "."]))
def test_a_unit_changes_nothing(number: int, unit: str) -> None:
    assert numbers(f"{number:,}{unit}") == (number,)


@given(st.text(max_size=300))
def test_no_text_breaks_the_reading(text: str) -> None:
    assert len(numbers(final_answer(text))) <= 2
    assert plain(plain(text)) == plain(text)


def test_conversations_are_read_from_their_last_message() -> None:
    assert text_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    assert text_of("b") == "b"
    assert text_of([{"role": "assistant", "content": ""}, {"role": "tool", "content": "42"}]) == "", "a tool's word"
