import re
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from grpo.builtin.tasks.arithmetic import EVENTS, LARGEST, Problem, problems, rows

seeds = st.integers(0, 2**32)


def key(problem: Problem) -> tuple:
    return problem.start, problem.steps


def read(question: str) -> int:
    """Return the answer that follows from the words alone."""
    sentences = re.findall(r"[^.?]+[.?]", question)
    value = int(re.findall(r"\d+", sentences[0])[0])
    for sentence in sentences[1:-1]:
        number = int(re.findall(r"\d+", sentence)[0])
        for operation, phrases in EVENTS.items():
            patterns = [re.escape(p).replace(r"\{she\}", "(She|He)").replace(r"\{n\}", r"\d+") for p in phrases]
            if any(re.fullmatch(pattern, sentence.strip()) for pattern in patterns):
                value = {"+": value + number, "-": value - number, "*": value * number, "/": value / number}[operation]
                break
        else:
            raise AssertionError(f"no operation in {sentence!r}")
    assert value == int(value)
    return int(value)


@given(seeds)
def test_the_answer_follows_from_the_words(seed: int) -> None:
    for problem in islice(problems("train", seed), 20):
        assert read(problem.question) == problem.answer
        assert 1 <= problem.answer <= LARGEST


@given(seeds, seeds)
def test_no_problem_is_in_both_splits(one: int, other: int) -> None:
    train = {key(problem) for problem in islice(problems("train", one), 100)}
    test = {key(problem) for problem in islice(problems("test", other), 50)}
    assert not train & test


def test_the_two_splits_share_few_numbers_with_operations() -> None:
    train = {key(problem) for problem in islice(problems("train", 0), 20_000)}
    test = {key(problem) for problem in islice(problems("test", 0), 2_000)}
    assert len(train) > 10_000
    assert not train & test


def test_a_seed_gives_the_same_rows_and_another_gives_others() -> None:
    assert rows("train", 10, seed=1) == rows("train", 10, seed=1)
    assert rows("train", 10, seed=1) != rows("train", 10, seed=2)
    assert rows("train", 3, seed=1) == rows("train", 10, seed=1)[:3]
    assert set(rows("test", 1, seed=0)[0]) == {"question", "answer", "steps"}
