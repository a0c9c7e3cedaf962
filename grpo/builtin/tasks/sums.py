"""Sums of two two-digit numbers: a task for a small pretrained policy, without a download."""

import random
from itertools import islice

from grpo.builtin.tasks.splits import of_split


def draw_summands(rng: random.Random) -> tuple[int, int]:
    """Draw two summands."""
    return rng.randint(10, 99), rng.randint(10, 99)


def rows(split: str, size: int, seed: int) -> list[dict[str, str | int]]:
    """Return `size` rows of a split with `question`, `answer` and the number of carries, `carried`."""
    sums = of_split(draw_summands, sorted, split, seed)  # 12 + 34 and 34 + 12 are the same sum
    return [
        {"question": f"{a} + {b}", "answer": str(a + b), "carried": (a % 10 + b % 10 > 9) + (a + b > 99)}
        for a, b in islice(sums, size)
    ]
