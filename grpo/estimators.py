"""How good a policy is, from a number of right and wrong completions: pure functions."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist, mean, stdev


def wilson_interval(correct: int, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of a proportion of `correct` among `samples` > 0.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / samples
    centre = share + z**2 / (2 * samples)
    spread = z * (share * (1 - share) / samples + z**2 / (4 * samples**2)) ** 0.5
    scale = 1 + z**2 / samples
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of the mean of one value in [0, 1] for each problem, by the central limit theorem.

    The samples of a problem are not independent of each other, so the problems are what is counted.
    """
    if len(values) < 2:
        return 0.0, 1.0
    spread = NormalDist().inv_cdf(0.5 + confidence / 2) * stdev(values) / len(values) ** 0.5
    return max(0.0, mean(values) - spread), min(1.0, mean(values) + spread)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the chance that of `k` of these samples, drawn without putting back, at least one is correct.

    It is the unbiased estimate of the chance that of `k` new samples one is.
    1 <= k <= samples, 0 <= correct <= samples.
    Source: M. Chen et al., "Evaluating large language models trained on code", 2021 (2107.03374), equation 1.
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[Hashable], correct: Sequence[bool], k: int) -> float:
    """Return how often the most frequent answer of `k` samples is correct, over the whole runs of `k` samples.

    Source: X. Wang et al., "Self-consistency improves chain of thought reasoning", 2022 (2203.11171). Answers that are
    equally frequent share the vote. An empty answer has no vote.

    Args:
        answers: the final answer of each sample, equal if they mean the same.
        correct: whether each sample is.
    """
    right = dict(zip(answers, correct, strict=True))
    outcomes = []
    for start in range(0, len(answers) - k + 1, k):
        votes = Counter(answer for answer in answers[start : start + k] if answer != "")
        most = max(votes.values(), default=0)
        tied = [answer for answer, count in votes.items() if count == most]
        outcomes.append(mean(right[answer] for answer in tied) if tied else 0.0)
    return mean(outcomes)
