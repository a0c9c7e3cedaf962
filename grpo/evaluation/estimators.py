"""How good a policy is, from a number of right and wrong completions: pure functions."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist, mean


def wilson_interval(correct: float, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of a proportion of `correct` among `samples` > 0.

    For a mean of values between 0 and 1, with their sum as `correct`, it is on the safe side: no such values vary more
    than zeros and ones.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / samples
    centre = share + z**2 / (2 * samples)
    spread = z * (share * (1 - share) / samples + z**2 / (4 * samples**2)) ** 0.5
    scale = 1 + z**2 / samples
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


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
    equally frequent share the vote, as do completions with the same answer of which some are correct. An empty answer
    has no vote.

    Args:
        answers: the final answer of each sample, equal if they mean the same.
        correct: whether each sample is.
    """
    outcomes = []
    for start in range(0, len(answers) - k + 1, k):
        part = list(zip(answers[start : start + k], correct[start : start + k], strict=True))
        votes = Counter(answer for answer, _ in part if answer != "")
        most = max(votes.values(), default=0)
        chosen = [right for answer, right in part if votes[answer] == most > 0]
        outcomes.append(mean(chosen) if chosen else 0.0)
    return mean(outcomes)
