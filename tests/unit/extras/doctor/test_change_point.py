"""The test for a lasting fall has the false alarm rate that it states, and finds falls."""

from random import Random

import pytest

from grpo.extras.doctor.change_point import FALSE_ALARMS, fall_of


@pytest.mark.parametrize("rise", [0.0, 1.0], ids=["flat", "learning"])
@pytest.mark.parametrize("steps", [20, 60, 200])
def test_a_mean_that_never_falls_gives_few_alarms(steps: int, rise: float) -> None:
    rng, alarms, series = Random(steps), 0, 400
    for _ in range(series):
        alarms += fall_of([rise * place / steps + rng.gauss(0, 0.1) for place in range(steps)]) is not None
    assert alarms <= 2 * FALSE_ALARMS * series


def test_waves_of_learning_give_few_alarms() -> None:
    """Noise in which a step shares half of its deviation with the step before is not independent."""
    rng, alarms = Random(0), 0
    for _ in range(200):
        level, values = 0.0, []
        for place in range(100):
            level = 0.5 * level + rng.gauss(0, 0.1)
            values.append(place / 100 + level)
        alarms += fall_of(values) is not None
    assert alarms <= 4


@pytest.mark.parametrize("start", [0.0, 0.5], ids=["learning before", "flat before"])
def test_a_fall_is_dated(start: float) -> None:
    rng = Random(1)
    values = [min(0.5, start + place / 50) + rng.gauss(0, 0.05) for place in range(60)]
    values += [0.05 + rng.gauss(0, 0.05) for _ in range(20)]
    fall = fall_of(values)
    assert fall is not None
    assert fall.place == 60
    assert (fall.before, fall.after) == (pytest.approx(0.5, abs=0.08), pytest.approx(0.05, abs=0.03))
    assert fall.p < 1e-6


def test_a_slow_decline_is_a_fall() -> None:
    rng = Random(2)
    assert fall_of([0.8 - 0.6 * place / 60 + rng.gauss(0, 0.05) for place in range(60)])


def test_a_dip_that_is_made_up_for_is_none() -> None:
    rng = Random(3)
    assert not fall_of([(0.1 if 30 <= place < 36 else 0.5) + rng.gauss(0, 0.05) for place in range(80)])


def test_a_small_fall_after_much_learning_is_none() -> None:
    rng = Random(4)
    values = [min(0.8, place / 40) - (0.1 if place >= 50 else 0) + rng.gauss(0, 0.01) for place in range(80)]
    assert not fall_of(values)
    assert fall_of(values[32:])


def test_a_few_or_equal_values_are_judged_without_an_error() -> None:
    assert fall_of([]) is None
    assert fall_of([1.0] * 10 + [0.0] * 9) is None
    assert fall_of([1.0] * 50) is None
