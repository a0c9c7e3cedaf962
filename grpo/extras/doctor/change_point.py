"""A test for a lasting fall of a series, with a stated rate of false alarms.

The null hypothesis is independent noise around a mean that never falls. The test scans all pairs of an earlier window
and the rest of the series behind it (a two-sample CUSUM, E. S. Page, 1954), and multiplies the smallest p-value by the
number of pairs (Bonferroni). The variance is half of the mean squared difference of neighbours (J. von Neumann, 1941),
to which a trend adds little. A rising mean only lowers the differences, so that the rate of false alarms is at most
`FALSE_ALARMS` for every such mean, for normal noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean

FALSE_ALARMS = 0.01
"""Rate of false alarms per series."""
LEAST = 20
"""Values that the test needs."""
DEPTH = 0.25
"""Smallest fall that counts, as a fraction of the range of the windows' means; smaller ones are waves of learning."""


@dataclass(frozen=True)
class Fall:
    """A lasting fall of a series."""

    place: int
    """Index of the first value behind it."""
    before: float
    """Mean of the best window before."""
    after: float
    """Mean of all values behind."""
    p: float
    """Probability of such a fall in a series whose mean never falls, at most."""


def fall_of(values: Sequence[float]) -> Fall | None:
    """Return the most significant lasting fall of a series; None if the test finds none, or there are too few values.

    A fall also has to exceed twice the standard deviation of the noise, and `DEPTH`.
    """
    count, width = len(values), max(5, len(values) // 10)
    if count < LEAST:
        return None
    noise = max(1e-12, (fmean((after - before) ** 2 for before, after in pairwise(values)) / 2) ** 0.5)
    windows = [fmean(values[start : start + width]) for start in range(count - width + 1)]
    pairs, best, most = 0, None, 0.0
    for place in range(width, count - width + 1):
        highest, after = max(windows[: place - width + 1]), fmean(values[place:])
        pairs += place - width + 1
        score = (highest - after) / (noise * (1 / width + 1 / (count - place)) ** 0.5)
        if score > most:
            best, most = (place, highest, after), score
    p = min(1.0, pairs * (1 - NormalDist().cdf(most)))
    if best is None or p > FALSE_ALARMS:
        return None
    place, highest, after = best
    if highest - after < max(2 * noise, DEPTH * (max(windows) - min(windows))):
        return None
    return Fall(place, highest, after, p)
