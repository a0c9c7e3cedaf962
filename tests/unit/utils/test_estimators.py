from itertools import combinations
from statistics import NormalDist, mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.utils.estimators import (
    difference_interval,
    majority_at_k,
    pass_at_k,
    unpaired_difference_interval,
    wilson_interval,
)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_ends_where_the_score_test_rejects(counts: tuple[int, int]) -> None:
    correct, samples = counts
    proportion, z = correct / samples, NormalDist().inv_cdf(0.975)
    low, high = wilson_interval(correct, samples)
    assert 0 <= low <= proportion <= high <= 1
    for end in (low, high):  # Wilson's interval solves this equation for the true proportion
        assert (proportion - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / samples, abs=1e-12)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_one(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    subsets = [any(subset) for subset in combinations(correct, k)]
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(mean(subsets))


@pytest.mark.parametrize(
    ("answers", "correct", "k", "value"),
    [
        ([5, 5, 6], [True, True, False], 3, 1.0),
        ([5, 6, 6], [True, False, False], 3, 0.0),
        ([5, 6], [True, False], 2, 0.5),  # a tie
        (["", "", 5], [False, False, True], 3, 1.0),  # no answer is no vote
        (["", ""], [False, False], 2, 0.0),
        ([5, 6, 6, 6], [True, False, False, False], 2, 0.25),  # two runs of two: a tie, and incorrect
        ([5, 6], [True, False], 1, 0.5),
        ([5, 5, 5], [True, True, False], 3, 2 / 3),  # the same answer, graded differently
    ],
)
def test_the_majority_of_k_answers_counts(answers: list, correct: list[bool], k: int, value: float) -> None:
    assert majority_at_k(answers, correct, k) == value


@given(st.lists(st.tuples(st.integers(0, 3)), min_size=1, max_size=10))
def test_a_majority_of_one_is_the_fraction_of_correct_samples(rows: list[tuple[int]]) -> None:
    answers = [answer for (answer,) in rows]
    correct = [answer == 0 for answer in answers]
    assert majority_at_k(answers, correct, 1) == pytest.approx(mean(correct))


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_interval_of_a_mean_holds_it_and_is_never_a_point(values: list[float]) -> None:
    low, high = wilson_interval(sum(values), len(values))
    assert low - 1e-9 <= mean(values) <= high + 1e-9
    assert high - low > 0


def test_the_interval_of_a_difference_is_that_of_its_source() -> None:
    low, high = unpaired_difference_interval(56, 70, 48, 80)  # Newcombe's first example
    assert (round(low, 4), round(high, 4)) == (0.0524, 0.3339)


@pytest.mark.parametrize("correlated", [False, True])
def test_95_percent_of_paired_intervals_hold_the_difference(correlated: bool) -> None:
    generator = np.random.default_rng(0)
    samples, first, second = 200, 0.6, 0.7
    inside = 0
    for _ in range(4000):
        drawn = generator.random((2, samples))
        one, other = drawn[0] < first, drawn[0 if correlated else 1] < second
        counts = [int((one & other).sum()), int((one & ~other).sum()), int((~one & other).sum())]
        low, high = difference_interval(*counts, samples - sum(counts))
        inside += low <= second - first <= high
    assert 0.94 <= inside / 4000 <= 0.985


def test_pairs_make_a_difference_more_certain() -> None:
    low, high = difference_interval(both=100, first=10, second=30, neither=60)
    assert unpaired_difference_interval(130, 200, 110, 200)[0] < low < 0.1 < high
    assert difference_interval(both=100, first=30, second=10, neither=60) == pytest.approx((-high, -low))


def test_the_interval_of_equal_runs_holds_zero() -> None:
    for counts in ((10, 0, 0, 0), (0, 0, 0, 10), (5, 0, 0, 5), (0, 1, 1, 0)):
        low, high = difference_interval(*counts)
        assert low <= 0 <= high
