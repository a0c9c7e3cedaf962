import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.choice import choice

OPTIONS = ["a dog", "a cat", "Vitamin C", "a horse, 3 years old"]


def score(text: str, answer: str, options: list[str] | None = None) -> float:
    (reward,) = choice([text], [answer], [options])
    if isinstance(reward, Exception):
        raise reward
    return reward


@pytest.mark.parametrize(
    "text",
    [
        "B",
        " B\n",
        "(B)",
        "[B]",
        "B.",
        "B)",
        "B) a cat",
        "B. a cat",
        "B: a cat",
        "(B) a cat",
        "B - a cat",
        "**B**",
        "**B. a cat**",
        "`B`",
        "Option B",
        "The answer is B",
        "The answer is B.",
        "the answer is (B).",
        "The correct option is **B**",
        "The answer would be option B",
        "Answer: B",
        "**Answer:**\n\nB. a cat",
        "#### B",
        r"\boxed{B}",
        r"So $\boxed{\text{B}}$.",
        "<answer>B</answer>",
        "<answer>\n(B) a cat\n</answer>",
        "<answer>The answer is B</answer>",
        r"<answer>\boxed{B}</answer>",
        "<answer>A</answer> no, <answer>B</answer>",
        "<think>It may be A. The answer is A.</think>\nB",
        "<think><answer>A</answer></think>\nB",
        "答案是B。",
        "#### B) a cat\n#### Explanation\nIt meows.",
        "A and C are no cats.\n\nB",
        "B\n\nThe picture shows a cat.",
        "A dog is a pet. So is this, but it says meow.\n\nThe answer is B",
        "A dog is in the picture, too.\nB",
        "The answer is A. No, the answer is B.",
        "The answer is B because A is a dog.",
        "The answer is B, not A.",
        "I think the answer is B",
        "The answer is B, I think.",
        "I think it is (B).",
        "A and C are no cats.\nSo it must be B.",
        "#### B\n\nAs A and C are no cats.",
    ],
)
def test_an_option_is_read_in_every_usual_form(text: str) -> None:
    assert score(text, "B") == 1.0
    assert score(text, "B", OPTIONS) == 1.0
    assert all(score(text, other) == 0.0 for other in "ACDEFGHIJ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A, B, C, D",
        "A B C D",
        "ABCD",
        "A/B",
        "(A)(B)(C)(D)",
        "A\nB\nC\nD",
        "A\n\nB",
        "A) a dog\nB) a cat\nC) Vitamin C",
        "A. a dog B. a cat C. Vitamin C",
        "A or B",
        "B, or maybe A",
        "The answer is A or B",
        "The answer is A, B, C or D",
        "The answer is:\nA\nB\nC",
        "The answer is not B",
        "Answer: A\nAnswer: B or A",
        "<answer>A, B</answer>",
        "<answer>A\nB</answer>",
        r"\boxed{A, B}",
        "#### A or B",
        "<answer></answer> B",
        "<answer>none</answer> The answer is B",
        "<think>The answer is B",
        "<think>B</think> nothing",
        "A dog",
        "A dog and a cat",
        "I think",
        "I'd say so",
        "Better",
        "b",
        "vitamin B12",
        "Somebody said B, I say A.",
    ],
)
def test_no_option_and_several_options_earn_nothing(text: str) -> None:
    assert all(score(text, letter) == 0.0 for letter in "ABCDEFGHIJ")
    assert all(score(text, "ABCD"[at], OPTIONS) == 0.0 for at in range(1, 4))


def test_the_article_and_the_pronoun_are_letters_only_as_answers() -> None:
    assert [score(text, "A") for text in ("A", "(A) a dog", "The answer is A because it barks", "A is correct")] == [
        1
    ] * 4
    assert [score(text, "I") for text in ("I", "The answer is I.", "I) a dog", "I think")] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "text", ["a cat", "A cat.", "The answer is a cat.", "<answer>A  Cat</answer>", "B) a cat", "B"]
)
def test_with_options_their_text_counts_too(text: str) -> None:
    assert score(text, "B", OPTIONS) == score(text, "a cat", OPTIONS) == 1.0
    assert score(text, "A", OPTIONS) == score(text, "a dog", OPTIONS) == 0.0


def test_a_letter_with_the_text_of_another_option_names_two() -> None:
    assert [score("A) a cat", letter, OPTIONS) for letter in "AB"] == [0.0, 0.0]


def test_a_letter_in_the_text_of_an_option_is_no_second_option() -> None:
    assert [score(text, "C", OPTIONS) for text in ("C) Vitamin C", "Vitamin C", "C")] == [1.0, 1.0, 1.0]
    assert score("B) Vitamin C", "C", OPTIONS) == score("B) Vitamin C", "B", OPTIONS) == 0.0


def test_markup_does_not_change_the_text_of_an_option() -> None:
    options = ["it's a *dog*", "$2x$"]
    assert (
        score("**It's a dog**", "A", options) == score("2x", "B", options) == score("B) $2x$", "$2x$", options) == 1.0
    )


def test_part_of_the_text_of_an_option_is_not_the_option() -> None:
    assert score("a horse", "D", OPTIONS) == 0.0
    assert score("a horse, 3 years old", "D", OPTIONS) == 1.0


@pytest.mark.parametrize(
    ("answer", "options"),
    [("", None), ("K", None), ("a cat", None), ("A, B", None), ("Vitamin C", None), ("a bird", OPTIONS), ("", OPTIONS)],
)
def test_an_answer_that_is_no_option_fails_its_own_row_alone(answer: str, options: list[str] | None) -> None:
    error, reward = choice(["B", "B"], [answer, "B"], [options, options])
    assert isinstance(error, ValueError)
    assert str(error) == f"answer {answer!r}: give a letter from A to J, or the text of an option"
    assert reward == 1.0


@given(
    st.lists(st.sampled_from("ABCDEFGHIJ"), min_size=2, unique=True), st.sampled_from([", ", " or ", "\n", " ", ") "])
)
def test_letters_of_several_options_earn_nothing_in_any_order(letters: list[str], between: str) -> None:
    assert {score(between.join(letters), letter) for letter in letters} == {0.0}


@given(st.text(alphabet="ABI ()[].,:\n*\\{}$<>/answeriboxdthk#'", max_size=100))
def test_at_most_one_option_is_read_in_any_text(text: str) -> None:
    assert sum(score(text, letter) for letter in "ABCDEFGHIJ") <= 1


@pytest.mark.parametrize(
    "part", ["A\n", "A ", "(", "answer is ", "\\boxed{", "#### ", "A) ", "\n", "<answer>", "option "]
)
def test_a_long_text_is_read_in_little_time(part: str) -> None:
    started = time.perf_counter()
    assert score(part * (100_000 // len(part)), "B") == 0.0
    assert time.perf_counter() - started < 3.0


def test_conversational_completions_are_read() -> None:
    assert choice([[{"role": "assistant", "content": "B"}]], ["B"]) == [1.0]
