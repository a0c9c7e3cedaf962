"""Estimates of accuracy, pass@k and maj@k from counts of correct completions: pure functions."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist, mean


def wilson_interval(correct: float, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson interval of a proportion, `correct` of `samples` > 0.

    With the sum of values between 0 and 1 as `correct` it is a conservative interval of their mean, because zeros and
    ones have the largest variance.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    proportion = correct / samples
    centre = proportion + z**2 / (2 * samples)
    spread = z * (proportion * (1 - proportion) / samples + z**2 / (4 * samples**2)) ** 0.5
    scale = 1 + z**2 / samples
    low, high = (centre - spread) / scale, (centre + spread) / scale
    return max(0.0, min(proportion, low)), min(1.0, max(proportion, high))  # rounding puts an end beside 0, or 1


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of `k` new samples is correct.

    It is the probability that a draw of `k` of these samples without replacement holds a correct sample, for
    1 <= k <= samples and 0 <= correct <= samples.
    Source: M. Chen et al., "Evaluating large language models trained on code", 2021 (2107.03374), equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable], correct: Sequence[bool], k: int) -> float:
    """Return the fraction of complete runs of `k` samples whose most frequent answer is correct.

    Source: X. Wang et al., "Self-consistency improves chain of thought reasoning", 2022 (2203.11171). Equally
    frequent answers share the vote, as do completions with the same answer of which only some are correct. An empty
    answer has no vote.

    Args:
        answers: final answer of each sample; equivalent answers compare equal.
        correct: whether each sample is correct.
    """
    outcomes = []
    for start in range(0, len(answers) - k + 1, k):
        run = list(zip(answers[start : start + k], correct[start : start + k], strict=True))
        votes = Counter(answer for answer, _ in run if answer != "")
        highest = max(votes.values(), default=0)
        chosen = [is_correct for answer, is_correct in run if votes[answer] == highest > 0]
        outcomes.append(mean(chosen) if chosen else 0.0)
    return mean(outcomes)


def difference_interval(
    both: int, first: int, second: int, neither: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of the difference of two proportions, that of the second less that of the first.

    Args:
        both: samples, such as problems, for which both are true.
        first: for which the first alone is true.
        second: for which the second alone is true.
        neither: for which neither is.
        confidence: of the interval.

    Source: R. G. Newcombe, "Improved confidence intervals for the difference between binomial proportions based on
    paired data", 1998, method 10.
    """
    samples = both + first + second + neither
    marginals = (both + first) * (second + neither) * (both + second) * (first + neither)
    product = both * neither - first * second
    corrected = max(product - samples / 2, 0.0) if product > 0 else product
    correlation = corrected / math.sqrt(marginals) if marginals else 0.0
    return _square_and_add(both + second, samples, both + first, samples, correlation, confidence)


def unpaired_difference_interval(
    correct: int, samples: int, others: int, other_samples: int, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of `correct` of `samples` less `others` of `other_samples`, which are other samples.

    Source: R. G. Newcombe, "Interval estimation for the difference between independent proportions", 1998, method 10.
    """
    return _square_and_add(correct, samples, others, other_samples, 0.0, confidence)


def _square_and_add(
    correct: int, samples: int, others: int, other_samples: int, correlation: float, confidence: float
) -> tuple[float, float]:
    p, q = correct / samples, others / other_samples
    (p_low, p_high), (q_low, q_high) = (
        wilson_interval(*counts, confidence) for counts in ((correct, samples), (others, other_samples))
    )

    def spread(below: float, above: float) -> float:
        return math.sqrt(max(0.0, below**2 - 2 * correlation * below * above + above**2))

    return p - q - spread(p - p_low, q_high - q), p - q + spread(p_high - p, q - q_low)
