from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rewards.notation import numbers, plain
from rewards.text import final_answer, text_of


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
        ("#### Step 1\nAdd.\n#### Step 2\nIt is 5.", "5"),
        ("#### 5\n\n#### Explanation\nWe add 2.", "5"),
        ("#### 5\n####", "5"),
        ("####\n5\nas we saw with 7", "5"),
        ("#### 1. Setup\nNothing.\n#### red circle", "red circle"),
        ("#### Paris\nThat is the capital.", "Paris"),
        (r"\boxed{\frac{\sqrt{1+\sqrt{\frac{1}{4}}}}{2}}", r"\frac{\sqrt{1+\sqrt{\frac{1}{4}}}}{2}"),
        (r"\boxed{\left\{1, 2\right\}} and \boxed{}", r"\left\{1, 2\right\}"),
        (r"\boxed{\frac{1}{2", r"\frac{1}{2"),
        ("<answer>4 or 5", "4 or 5"),
        (r"<think>\boxed{4}</think> so 5", "5"),
        ("4</think>\n#### 5\n<think>or 6", "5"),
        ("<think>5, or", ""),
        ("答案是5。", "5"),
        ("合計は1,234円", "1,234"),
        ("at 10:30", "10:30"),
        ("10時30分", "10時30分"),
        ("It is minus 5", "-5"),
        ("It is - 5", "-5"),
        ("7 - 5", "5"),
        ("so:\n- 5 apples", "5"),
        ("The area is 5 m^2", "5"),
        (r"It is 1.5 \times 10^{3}.", r"1.5 \times 10^{3}"),
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
        ("- 5", -5),
        ("minus 5 degrees", -5),
        ("50€", 50),
        ("₹50", 50),
        ("US$ 50", 50),
        ("50 $", 50),
        ("20kg", 20),
        ("20 km/h", 20),
        ("20 m²", 20),
        (r"9.8\,\mathrm{m/s^2}", Fraction(49, 5)),
        (r"90^{\circ}", 90),
        ("42元", 42),
        ("42개입니다", 42),
        ("42千克", 42),
        ("1.5e3", 1500),
        ("1.5 x 10^3", 1500),
        (r"1.5 \times 10^{-3}", Fraction(3, 2000)),
        ("1.5 × 10³ m", 1500),
        (r"\frac{1}{2}\text{ cup}", Fraction(1, 2)),
        (r"3\frac12", Fraction(7, 2)),
        ("$1{,}234$", 1234),
        ("= 42,", 42),
    ],
)
def test_a_number_is_read_however_it_is_written(answer: str, value: int | Fraction) -> None:
    assert numbers(answer) == (value,)


@pytest.mark.parametrize("answer", ["50%", "50 %", "50 percent", r"50\%", r"$50\%$", "50 per cent"])
def test_percent_may_be_the_number_or_the_share(answer: str) -> None:
    assert numbers(answer) == (50, Fraction(1, 2))


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "5x",
        "20xy",
        "20pi",
        "20 + 1",
        "5k",
        "42万",
        "3分之1",
        r"4 \text{ hundred}",
        "The answer is 5",
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
@example("\\~")
@example("\\\\! ")
def test_no_text_breaks_the_reading(text: str) -> None:
    assert len(numbers(final_answer(text))) <= 2
    assert plain(plain(text)) == plain(text)


def test_conversations_are_read_from_their_last_message() -> None:
    assert text_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"
    assert text_of("b") == "b"
    assert text_of([{"role": "assistant", "content": ""}, {"role": "tool", "content": "42"}]) == "", "a tool's word"
