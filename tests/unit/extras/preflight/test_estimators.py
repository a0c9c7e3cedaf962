from itertools import combinations, pairwise
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.extras.preflight.estimators import (
    equal_by_fit,
    equal_in_draw,
    extrapolated,
    fitted,
    mean_of_problems,
    never,
    non_zero_variance,
    pass_at,
    table_of,
)


def counts_of(chances: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Incorrect and correct completions of problems with these chances of a correct one."""
    correct = np.random.default_rng(seed).binomial(samples, chances)
    return np.stack([samples - correct, correct], axis=1)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=8), st.data())
def test_equal_in_draw_is_the_fraction_of_equal_subsets(outcomes: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(outcomes)))
    subsets = [len(set(subset)) == 1 for subset in combinations(outcomes, size)]
    counts = [outcomes.count(value) for value in range(3)]
    assert equal_in_draw(counts, size) == pytest.approx(mean(subsets))


def test_the_moments_of_the_model_are_those_of_beta() -> None:
    draws = np.random.default_rng(0).beta(0.7, 2.1, size=400_000)
    for size in (1, 2, 8, 16):
        assert never(0.7, 2.8, size) == pytest.approx(float((draws**size).mean()), rel=0.03)
    assert never(0.0, 1.0, 3) == 0.0


def test_equal_by_the_model_adds_up_over_both_outcomes() -> None:
    chances = np.random.default_rng(0).beta(0.5, 1.0, size=40_000)
    counts = counts_of(chances, 8, seed=1)
    for size in (2, 8, 32):
        assert equal_by_fit(counts, size) == pytest.approx(
            float((chances**size + (1 - chances) ** size).mean()), abs=0.02
        )


def test_groups_of_several_outcomes_are_extrapolated() -> None:
    random = np.random.default_rng(0)
    chances = random.dirichlet([0.3, 0.5, 0.2], size=20_000)
    counts = np.array([random.multinomial(8, some) for some in chances])
    for size in (16, 64):
        truth = 1 - float((chances**size).sum(1).mean())
        assert 1 - extrapolated(counts, size, equal_in_draw, equal_by_fit) == pytest.approx(truth, abs=0.03)


def test_constant_problems_beside_continuous_ones_stay_constant() -> None:
    table = table_of([*([float(10 * n + one) for one in range(8)] for n in range(9)), *[[-1.0] * 8] * 11])
    for size in (2, 8, 16, 64):
        assert non_zero_variance(table, size).value == pytest.approx(0.45, abs=0.03)


@pytest.mark.parametrize("true", [(0.3, 0.9), (1.0, 1.0), (2.0, 6.0)])
def test_the_fit_finds_the_parameters_of_many_problems(true: tuple[float, float]) -> None:
    chances = np.random.default_rng(0).beta(true[1], true[0], size=20_000)
    assert fitted(counts_of(chances, 8, seed=1)) == pytest.approx(np.array(true), rel=0.1)


def test_the_fit_takes_problems_that_are_all_alike() -> None:
    assert equal_by_fit(counts_of(np.full(5000, 0.5), 8, seed=0), 8) == pytest.approx(2 * 0.5**8, rel=0.2)
    assert equal_by_fit(np.array([[8, 0], [0, 8], [8, 0]]), 64) > 0.98, "each problem has one outcome only"


def test_up_to_the_samples_an_estimate_is_unbiased() -> None:
    chances = np.random.default_rng(0).beta(0.4, 0.8, size=40_000)
    counts = counts_of(chances, 4, seed=1)
    for size in (2, 3, 4):
        varied = 1 - extrapolated(counts, size, equal_in_draw, equal_by_fit)
        assert varied == pytest.approx(1 - float((chances**size + (1 - chances) ** size).mean()), abs=0.01)


@pytest.mark.parametrize(("a", "b"), [(0.5, 1.5), (0.2, 0.2), (1.0, 20.0), (5.0, 5.0)])
def test_intervals_hold_the_truth_at_8_times_the_samples(a: float, b: float) -> None:
    many = np.random.default_rng(1).beta(a, b, size=200_000)
    passed = float((1 - (1 - many) ** 64).mean())
    varied = float((1 - many**64 - (1 - many) ** 64).mean())
    inside = 0
    for seed in range(20):
        counts = counts_of(np.random.default_rng(seed).beta(a, b, size=64), 8, seed)
        for estimate, truth in ((pass_at(counts, 64), passed), (non_zero_variance(counts, 64), varied)):
            inside += estimate.low <= truth <= estimate.high
            assert estimate.value == pytest.approx(truth, abs=0.25)
    assert inside >= 32, "of 40 intervals of 95 %, of which a model of the problems is a part"


@settings(max_examples=25)
@given(st.lists(st.integers(0, 8), min_size=2, max_size=20))
def test_larger_groups_vary_more_and_pass_more(correct: list[int]) -> None:
    counts = np.array([[8 - number, number] for number in correct])
    for estimate in (pass_at, non_zero_variance):
        estimates = [estimate(counts, size) for size in (2, 4, 8, 16, 32, 64)]
        values = [one.value for one in estimates]
        assert all(one <= other + 1e-12 for one, other in pairwise(values))
        assert values[0] >= 0
        assert values[-1] <= 1
        assert all(one.low <= one.value <= one.high for one in (estimates[2], estimates[-1]))


def test_continuous_rewards_always_vary() -> None:
    table = table_of([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    assert [non_zero_variance(table, size).value for size in (2, 3, 64)] == [1.0, 1.0, 1.0]


def test_the_mean_over_problems_has_a_normal_interval() -> None:
    estimate = mean_of_problems([0.0, 1.0, 2.0, 3.0])
    half = 1.96 * (5 / 3) ** 0.5 / 2
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.5, 1.5 - half, 1.5 + half), rel=1e-4)


def test_a_table_has_a_row_per_problem_and_skips_nothing() -> None:
    assert table_of([["a", "b", "a"], [], ["b"]]).tolist() == [[2, 1], [0, 0], [0, 1]]


def test_a_problem_without_two_rewards_has_no_variance() -> None:
    table = table_of([["a", "b", "a", "b"], ["a"], []])
    assert non_zero_variance(table, 4).value == pytest.approx(1 / 3)
    assert non_zero_variance(table_of([[], []]), 8).value == 0.0
