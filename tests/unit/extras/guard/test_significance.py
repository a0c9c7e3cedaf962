"""Error rates and power of the guard's tests, by simulation of answers to the same problems."""

import numpy as np
import pytest

from grpo.extras.guard.significance import changed, largest_rise, level, p_of_fall


def simulated(rng: np.random.Generator, accuracies: list[float], samples: int = 128, flips: float = 0.1) -> list[str]:
    """Return the answers of a run: ability per problem, of which `flips` is drawn anew at each look."""
    ability, looks = rng.random(samples), []
    for accuracy in accuracies:
        anew = rng.random(samples) < flips
        ability = np.where(anew, rng.random(samples), ability)
        looks.append("".join("1" if value < accuracy else "0" for value in ability))
    return looks


def falls(looks: list[str], error: float = 0.05) -> int | None:
    """Return the first look that has fallen from the best before it."""
    best = looks[0]
    for number, look in enumerate(looks[1:], 1):
        if look.count("1") > best.count("1"):
            best = look
        elif p_of_fall(best, look) <= level(error, len(looks)):
            return number
    return None


def test_changed_answers_are_counted_both_ways() -> None:
    assert changed("0011", "0101") == (1, 1)


def test_p_is_the_exact_sign_test() -> None:
    assert p_of_fall("1" * 8, "0" * 8) == 1 / 256
    assert p_of_fall("10", "01") == 3 / 4
    assert p_of_fall("01", "01") == 1


def test_the_level_is_divided_by_pairs_of_looks() -> None:
    assert level(0.05, 11) == 0.05 / 55
    assert level(0.05, 1) == 0.05


@pytest.mark.parametrize("flips", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("looks", [5, 21])
def test_a_run_that_never_falls_rarely_goes_back(flips: float, looks: int) -> None:
    rng = np.random.default_rng(0)
    runs = [simulated(rng, [0.7] * looks, flips=flips) for _ in range(400)]
    assert sum(falls(run) is not None for run in runs) <= 0.05 * len(runs)


def test_a_rising_run_never_goes_back() -> None:
    rng = np.random.default_rng(0)
    rising = [0.1 + 0.04 * number for number in range(21)]
    assert not any(falls(simulated(rng, rising)) for _ in range(200))


def test_a_fall_of_twenty_points_is_seen_at_once() -> None:
    rng = np.random.default_rng(0)
    runs = [simulated(rng, [0.7] * 5 + [0.5] * 5) for _ in range(200)]
    assert np.mean([falls(run) == 5 for run in runs]) >= 0.9


def test_a_plateau_is_seen_and_a_rise_is_none() -> None:
    rng = np.random.default_rng(0)
    flat = [simulated(rng, [0.9] * 6, flips=0.02) for _ in range(200)]
    rises = [simulated(rng, [0.6 + 0.01 * number for number in range(6)], flips=0.02) for _ in range(200)]
    ends = [np.mean([largest_rise(run[0], run[-1]) < 0.05 for run in runs]) for runs in (flat, rises)]
    assert ends[0] >= 0.8
    assert ends[1] <= 0.12
