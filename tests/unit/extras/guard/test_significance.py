"""Error rates and power of the guard's tests, by simulation of answers to the same problems."""

import numpy as np
import pytest

from benchmarks import guard_power
from benchmarks.guard_power import ends, first_fall, seen, simulated
from benchmarks.pages import with_part
from grpo.extras.guard.significance import changed, level, p_of_fall


def test_changed_answers_are_counted_both_ways() -> None:
    assert changed("0011", "0101") == (1, 1)
    assert changed("1110", "0001") == (1, 3)


def test_p_is_the_exact_sign_test() -> None:
    assert p_of_fall("1" * 8, "0" * 8) == 1 / 256
    assert p_of_fall("10", "01") == 3 / 4
    assert p_of_fall("01", "01") == 1


def test_the_level_is_divided_by_pairs_of_looks() -> None:
    assert level(0.05, 11) == 0.05 / 55
    assert level(0.05, 1) == 0.05


@pytest.mark.parametrize("flips", [0.02, 0.5])
@pytest.mark.parametrize("looks", [5, 21])
def test_a_run_that_never_falls_rarely_goes_back(flips: float, looks: int) -> None:
    rng = np.random.default_rng(1)
    runs = [simulated(rng, [0.7] * looks, 64, flips) for _ in range(200)]
    assert sum(first_fall(run) is not None for run in runs) <= 0.05 * len(runs)


def test_the_undivided_level_goes_back_too_often() -> None:
    rng = np.random.default_rng(1)
    runs = [simulated(rng, [0.7] * 21, 64, flips=0.5) for _ in range(200)]
    assert sum(first_fall(run, error=210 * 0.05) is not None for run in runs) > 0.2 * len(runs), "each pair at 5 %"


def test_a_rising_run_never_goes_back() -> None:
    rng = np.random.default_rng(1)
    rising = [0.1 + 0.04 * number for number in range(21)]
    assert not any(first_fall(simulated(rng, rising, 64)) for _ in range(100))


def test_a_fall_of_thirty_points_is_seen() -> None:
    assert seen(64, 0.3) >= 0.9


def test_a_plateau_is_seen_and_a_rise_is_none() -> None:
    assert ends(128, 0.0, 0.02) >= 0.8
    assert ends(128, 0.01, 0.02) <= 0.15


def test_the_page_has_the_simulated_rates() -> None:
    page = guard_power.PAGE.read_text(encoding="utf-8")
    assert with_part(guard_power.PAGE, "benchmarks.guard_power", guard_power.part()) == page
