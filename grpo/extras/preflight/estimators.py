"""Estimates from a few completions of each of some problems, and their 95 % intervals: pure functions.

Up to the number of completions sampled per problem an estimate is unbiased: a draw without replacement of these. Beyond
it a model of the problems extrapolates: the probabilities of a problem's outcomes are drawn from a Dirichlet
distribution, of two outcomes a beta distribution, so that counts of outcomes are Dirichlet-multinomial (J. G. Skellam,
"A probability distribution derived from the binomial distribution by regarding the probability of success as variable
between the sets of trials", 1948; for pass@k J. Kazdan et al., "Efficient prediction of pass@k scaling in large
language models", 2025, 2510.05197).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from grpo.utils.estimators import pass_at_k, wilson_interval

Array = np.ndarray
PRECISIONS = np.geomspace(1e-3, 1e4, 141)
"""Candidate sums of Dirichlet parameters, 12 % apart: from problems with a single outcome each to problems that are all
alike."""
OUTCOMES = 8
"""Outcomes of all problems at most of which each has a parameter; more are taken for a continuous reward."""
RESAMPLES = 200
"""Bootstrap resamples of the problems."""
ALIKE = 0.1
"""Correlation of the information in two completions of a problem: a rule of thumb."""
Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it; an end that is not known is None."""
        return {"value": self.value, "interval": [end if math.isfinite(end) else None for end in (self.low, self.high)]}


def mean_of_problems(values: Sequence[float]) -> Estimate:
    """Return the mean of a value per problem, with a normal interval over the problems.

    Completions of a problem are alike, so problems, not completions, are the independent draws. The interval of a
    single problem is infinite.
    """
    mean, count = fmean(values), len(values)
    if count < 2:
        return Estimate(mean, -math.inf, math.inf)
    spread = Z * float(np.std(values, ddof=1)) / math.sqrt(count)
    return Estimate(mean, mean - spread, mean + spread)


def proportion(values: Sequence[float]) -> Estimate:
    """Return the mean of a value between 0 and 1 per problem, with Wilson's interval over the problems.

    It is conservative, because zeros and ones have the largest variance, and never a point.
    """
    return Estimate(fmean(values), *wilson_interval(sum(values), len(values)))


def equal_in_draw(counts: Sequence[int], size: int) -> float:
    """Return the probability that a draw of `size` of a problem's completions holds a single outcome.

    Args:
        counts: completions per outcome; at least `size` in total.
        size: completions in the draw, which is without replacement.
    """
    return sum(math.comb(count, size) for count in counts) / math.comb(sum(counts), size)


def fitted(counts: Array) -> Array:
    """Return the parameters of the Dirichlet-multinomial distribution of some problems' counts, (outcomes).

    The distribution has the mean of the counts; the sum of the parameters is the most likely value in `PRECISIONS`. The
    logarithm of the likelihood is the sum of log(parameter + j) over the numbers j below each count, less the same sum
    for the totals.

    Args:
        counts: (problems, outcomes), completions of each problem per outcome.
    """
    counts = np.asarray(counts)
    counts = counts[counts.sum(1) > 0]
    totals = counts.sum(1)
    mean = counts.sum(0) / totals.sum()
    below = np.arange(totals.max())
    reached = (counts[:, :, None] > below).sum(0)  # (outcomes, j): problems whose count is above j
    drawn = (totals[:, None] > below).sum(0)  # (j)
    likelihood = np.zeros(len(PRECISIONS))
    for outcome in np.flatnonzero(mean):
        likelihood += (reached[outcome] * np.log(PRECISIONS[:, None] * mean[outcome] + below)).sum(1)
    likelihood -= (drawn * np.log(PRECISIONS[:, None] + below)).sum(1)
    return PRECISIONS[likelihood.argmax()] * mean


def never(parameter: float, total: float, size: int) -> float:
    """Return the probability that all of `size` completions of a new problem have a given outcome, by the fitted model.

    It is the moment E[p^size] of a beta distribution: the product of (parameter + j) / (total + j) for j below `size`.

    Args:
        parameter: parameter of the outcome.
        total: sum of the parameters of all outcomes, above 0.
    """
    if parameter <= 0:
        return 0.0
    below = np.arange(size)
    return float(np.exp(np.log((parameter + below) / (total + below)).sum()))


def equal_by_fit(counts: Array, size: int) -> float:
    """Return the probability that `size` completions of a new problem all have the same outcome, by the fitted model.

    With more than `OUTCOMES` outcomes the model distinguishes completions with the most frequent outcome of their
    problem from all others: larger groups are equal by that outcome alone, and a single precision for all outcomes
    would not suit constant problems beside problems in which every completion differs.
    """
    if counts.shape[1] > OUTCOMES:
        largest = counts.max(1)
        others, same = fitted(np.stack([counts.sum(1) - largest, largest - 1], axis=1))
        return never(float(same), float(others + same), size - 1)
    parameters = fitted(counts)
    return sum(never(float(parameter), float(parameters.sum()), size) for parameter in parameters)


def extrapolated(
    counts: Array, size: int, observed: Callable[[Sequence[int], int], float], fit: Callable[[Array, int], float]
) -> float:
    """Return the mean over problems of a probability that falls with the size of a draw.

    Up to the number of completions of a problem the value is `observed`; beyond, it falls from there like `fit`. For a
    problem with fewer than two completions, because a reward failed, it is 1.

    Args:
        counts: (problems, outcomes).
        observed: from the counts of a problem, and a size, to the probability in draws of that size.
        fit: from the counts of all problems, and a size, to the probability by the fitted model.
    """
    known = counts[counts.sum(1) > 1]
    if not len(known):
        return 1.0
    largest, without = int(known.sum(1).max()), 1 - len(known) / len(counts)
    enough = known[known.sum(1) >= min(size, largest)]
    value = fmean(observed([int(count) for count in row], min(size, largest)) for row in enough)
    if size > largest and value:
        value *= min(1.0, fit(known, size) / max(fit(known, largest), 1e-300))
    return without + (1 - without) * value


def with_interval(counts: Array, of: Callable[[Array], float]) -> Estimate:
    """Return an estimate that is a mean over problems of values between 0 and 1, with its interval.

    The interval is the hull of Wilson's and of the percentiles of a bootstrap over the problems (B. Efron, 1979), which
    has the error of the fit as well; a bootstrap alone would be a point if all problems are alike.
    """
    value, problems = of(counts), len(counts)
    draws = np.random.default_rng(0).integers(problems, size=(RESAMPLES, problems))
    low, high = np.percentile([of(counts[draw]) for draw in draws], [2.5, 97.5])
    least, most = wilson_interval(value * problems, problems)
    return Estimate(value, min(float(low), least), max(float(high), most))


def pass_at(counts: Array, k: int) -> Estimate:
    """Return pass@k: the probability that at least one of `k` completions of a problem is correct.

    Args:
        counts: (problems, 2), incorrect and correct completions of each problem.
    """

    def missed(row: Sequence[int], size: int) -> float:
        return 1 - pass_at_k(sum(row), row[1], size)

    def missed_by_fit(drawn: Array, size: int) -> float:
        parameters = fitted(drawn)
        return never(float(parameters[0]), float(parameters.sum()), size)

    return with_interval(counts, lambda drawn: 1 - extrapolated(drawn, k, missed, missed_by_fit))


def non_zero_variance(counts: Array, size: int) -> Estimate:
    """Return the fraction of groups of `size` completions whose outcomes are not all equal.

    Args:
        counts: (problems, outcomes); an outcome is a value of the total reward.
    """
    return with_interval(counts, lambda drawn: 1 - extrapolated(drawn, size, equal_in_draw, equal_by_fit))


def table_of(outcomes: Sequence[Sequence[object]]) -> Array:
    """Return how often each problem has each outcome, (problems, outcomes)."""
    columns = {
        outcome: place for place, outcome in enumerate(dict.fromkeys(value for row in outcomes for value in row))
    }
    table = np.zeros((len(outcomes), max(1, len(columns))), dtype=int)
    for problem, row in enumerate(outcomes):
        for outcome in row:
            table[problem, columns[outcome]] += 1
    return table


def effective(completions: float, size: int) -> float:
    """Return the number of independent completions that tell as much as some in groups, by the design effect.

    L. Kish, "Survey sampling", 1965: completions of a problem are alike, so that few large groups tell less.

    Args:
        completions: in groups with non-zero variance.
        size: of a group.
    """
    return completions / (1 + (size - 1) * ALIKE)
