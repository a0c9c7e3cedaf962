"""1 for a short completion, falling to 0 for a long completion; 0 for an empty completion."""

from collections.abc import Sequence
from typing import Any

from rewards.text import text_of


def brevity(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    enough: int = 128,
    limit: int = 512,
    **columns: Any,
) -> list[float]:
    """Score the length of each completion.

    Args:
        enough: tokens up to which the reward is 1, so that cutting a short answer gains nothing.
        limit: tokens from which on the reward is 0.

    Raises:
        ValueError: `enough` is not below `limit`.
    """
    if enough >= limit:
        raise ValueError(f"enough={enough}, limit={limit}: the limit has to be larger")
    rewards = [min(1.0, max(0.0, (limit - len(tokens)) / (limit - enough))) for tokens in completion_ids]
    return [
        reward if text_of(completion).strip() else 0.0 for completion, reward in zip(completions, rewards, strict=True)
    ]
