"""0 for a completion without repetition, down to -1 for a completion of repetitions only."""

from collections.abc import Sequence
from typing import Any

from trl.rewards import get_repetition_penalty_reward


def repetition(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    ngram_size: int = 4,
    free: float = 0.2,
    **columns: Any,
) -> list[float]:
    """Punish the fraction of n-grams that are repetitions, as in TRL (2502.03373).

    Args:
        ngram_size: tokens per n-gram.
        free: fraction that is not punished, as all text repeats itself a little.
    """
    penalties = get_repetition_penalty_reward(ngram_size, max_penalty=-1.0)(completion_ids=completion_ids)
    return [min(0.0, (penalty + free) / (1 - free)) for penalty in penalties]
