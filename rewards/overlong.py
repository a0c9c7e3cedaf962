"""0 for a completion that ends in time, down to -1 for a completion that reaches the limit: DAPO's soft punishment."""

from collections.abc import Sequence
from typing import Any

from trl.rewards import get_soft_overlong_punishment


def overlong(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    max_completion_length: int,
    cache: int | None = None,
    **columns: Any,
) -> list[float]:
    """Punish length linearly over the last `cache` tokens before the limit (equation 13 of 2503.14476, as in TRL).

    Args:
        max_completion_length: tokens from which on the reward is -1.
        cache: tokens before the limit at which the punishment begins; None for a fifth of the limit, as in DAPO.
    """
    cache = max(1, max_completion_length // 5) if cache is None else cache
    return get_soft_overlong_punishment(max_completion_length, cache)(completion_ids=completion_ids)
