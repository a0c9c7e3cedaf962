import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.correctness import correctness, same


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("1,000", "1000"),
        ("$18.00", "18"),
        ("18 dollars", "$18"),
        ("0.5", "1/2"),
        ("50%", "50"),
        ("50%", "0.5"),
        ("50", "50%"),
        ("x + 1", "x + 1"),
        ("1+x", "x+1"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{\sqrt{2}}{2}", r"1/\sqrt{2}"),
        (r"\{4, 5\}", r"\{5, 4\}"),
        ("  Paris ", "paris"),
        (r"\text{Tuesday}", "Tuesday"),
        (r"18 \text{ dollars}", "$18"),
        ("36 cm", r"36\text{ cm}"),
        (r"5\sqrt{2}\text{ cm}", r"5\sqrt{2}"),
        ("28", r"$28\%$"),
        (r"50\%", r"\frac{1}{2}"),
        ("10:30 AM", r"10:30\text{ a.m.}"),
        ("22:30", "10:30 p.m."),
        ("The train leaves at 10:30", "10:30"),
        ("3, 2", "2 and 3"),
        ("2, 3", "[2, 3]"),
        ("(3, 4), (1, 2)", "(1, 2) and (3, 4)"),
        (r"-\sqrt{2}, \sqrt{2}", r"\sqrt{2}, -\sqrt{2}"),
        ("2 or 3", "2, 3"),
        ("The answer is 42.", "42"),
        ("Final answer: $42", "42"),
        ("he has 42 pens left", "42"),
        ("答案是42", "42"),
        (r"\frac{1}{1000}", "10^{-3}"),
        (r"10^{-30}", "10^{-30}"),
    ],
)
def test_the_same_answer_written_otherwise_counts(answer: str, reference: str) -> None:
    assert same(answer, reference)


@pytest.mark.parametrize(
    ("answer", "reference"),
    [
        ("", "5"),
        ("", ""),
        ("51", "5"),
        ("5 7", "5"),
        ("4 or 5", "5"),
        ("5 or 4", "5"),
        ("5, 4", "5"),
        ("-5", "5"),
        ("0.5%", "50%"),
        ("NaN", "NaN5"),
        ("Pairs", "Paris"),
        ("2", "2x"),
        ("2y", "2x"),
        ("3", "3i"),
        ("2", "2 pi"),
        ("x + 2", "x + 1"),
        ("(2, 1)", "(1, 2)"),
        ("1" * 10_000, "1"),
        (r"\frac{", "0.5"),
        (r"4 \text{ hundred}", "4"),
        (r"4 \text{ and } 5", "4"),
        ("not 41 but 42", "41"),
        ("It is 42 or more", "42"),
        ("The answer is 42 million", "42"),
        ("half of 42", "42"),
        ("Step 2", "2"),
        ("2", "2, 3"),
        ("2, 2", "2, 3"),
        ("(1, 4), (3, 2)", "(1, 2), (3, 4)"),
        ("[3, 2]", "[2, 3]"),
        ("1,234", "1, 234"),
        ("10:30", "30"),
        ("20:30", "10:15"),
        ("10:30 p.m.", "10:30 a.m."),
        ("29", r"$28\%$"),
        (r"6.6 \times 10^{-34}", r"1.6 \times 10^{-19}"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        (r"\frac{\pi}{10^{20}}", r"\frac{\pi}{10^{21}}"),
    ],
)
def test_another_answer_does_not_count(answer: str, reference: str) -> None:
    assert not same(answer, reference)


def test_mathematics_is_compared_off_the_main_thread_too() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(same("1+x", "x+1")))
    thread.start()
    thread.join()
    assert found == [True]


@given(st.integers(-(10**9), 10**9))
def test_a_number_is_correct_exactly_when_it_is_the_reference(number: int) -> None:
    completions = [f"#### {number}", f"#### {number:,}", f"\\boxed{{{number}}}", f"#### {number + 1}", ""]
    assert correctness(completions, [str(number)] * 5) == [1, 1, 1, 0, 0]


def test_the_last_number_counts_only_if_it_is_asked_for() -> None:
    assert correctness(["so it is 5"], ["5"]) == [1]
    assert correctness(["so it is 5"], ["5"], find=["hash", "boxed", "answer"]) == [0]


def test_conversational_completions_are_read() -> None:
    assert correctness([[{"role": "assistant", "content": "#### 5"}]], ["5"]) == [1]


def test_without_a_mark_or_a_number_a_short_line_is_the_answer() -> None:
    completions = ["Red  circle\n", "a red circle", "red circle\nred square", "", "It is red.\n#### red circle"]
    assert correctness(completions, ["red circle"] * 5) == [1, 0, 0, 0, 1]
