"""0 for a completion that does not repeat itself, down to -1 for one that does nothing else."""

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
    """Punish the share of n-grams that have been there before, as in TRL (2502.03373).

    Args:
        completion_ids: the tokens of each completion.
        ngram_size: how many tokens make an n-gram.
        free: the share that is not punished, since all text repeats itself a little.
    """
    penalties = get_repetition_penalty_reward(ngram_size, max_penalty=-1.0)(completion_ids=completion_ids)
    return [min(0.0, (penalty + free) / (1 - free)) for penalty in penalties]
