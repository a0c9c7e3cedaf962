"""1 for a short completion, falling to 0 for a long one; nothing for saying nothing."""

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
        completion_ids: the tokens of each completion.
        enough: up to so many tokens the reward is 1, so that an answer is not cut to win more.
        limit: from so many on it is 0.
    """
    if enough >= limit:
        raise ValueError(f"enough={enough}, limit={limit}: the limit has to be larger")
    rewards = [min(1.0, max(0.0, (limit - len(tokens)) / (limit - enough))) for tokens in completion_ids]
    return [reward if text_of(said).strip() else 0.0 for said, reward in zip(completions, rewards, strict=True)]
