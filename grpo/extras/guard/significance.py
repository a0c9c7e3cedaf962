"""Tests of the answers to the same problems at several looks: whether accuracy has fallen, or rises no longer.

All looks see the same problems, so that looks depend on each other in an unknown way, and the best look is chosen by
its own answers. Products of e-values would need new problems at each look. The level is therefore divided by the number
of pairs of looks (Bonferroni): whichever look is the best, and however looks depend on each other, the probability that
any pair shows a fall, where accuracy never falls, is at most `error`. A pair is compared by McNemar's exact test, the
sign test of the problems whose answer has changed (McNemar 1947, Psychometrika 12).
"""

from math import comb, sqrt
from statistics import NormalDist

CONFIDENCE = NormalDist().inv_cdf(0.9)
"""Quantile of the one-sided confidence bound of a rise."""


def changed(before: str, now: str) -> tuple[int, int]:
    """Return how many answers have become correct and how many incorrect; `1` is a correct answer, `0` any other."""
    pairs = list(zip(before, now, strict=True))
    return pairs.count(("0", "1")), pairs.count(("1", "0"))


def p_of_fall(before: str, now: str) -> float:
    """Return the one-sided p of McNemar's exact test, where accuracy has not fallen."""
    gained, lost = changed(before, now)
    size = gained + lost
    return sum(comb(size, count) for count in range(lost, size + 1)) / 2**size


def level(error: float, looks: int) -> float:
    """Return the level of the test of a pair of looks.

    Args:
        error: probability of any fall in a run whose accuracy never falls.
        looks: planned for the run, the first one before its first step.
    """
    return error / comb(max(looks, 2), 2)


def largest_rise(before: str, now: str) -> float:
    """Return the upper confidence bound, 90 %, of the rise of accuracy between two looks, as a fraction.

    Source: Agresti and Min 2005, Statistics in Medicine 24: Wald's interval with half an answer more in each cell.
    """
    gained, lost = changed(before, now)
    size, rise = len(before) + 2, gained - lost
    return (rise + CONFIDENCE * sqrt(gained + lost + 1 - rise**2 / size)) / size
