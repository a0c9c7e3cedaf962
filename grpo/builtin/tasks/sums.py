"""Sums of two two-digit numbers: a task for a small pretrained policy, without a download."""

import random
import zlib
from collections.abc import Iterator
from itertools import islice


def sums(split: str, seed: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of summands of a split, `train` or `test`, without end. The splits have no sum in common."""
    rng = random.Random(seed)
    while True:
        summands = rng.randint(10, 99), rng.randint(10, 99)
        held_out = zlib.crc32(repr(sorted(summands)).encode()) % 10 == 0  # 12 + 34 and 34 + 12 are the same sum
        if held_out == (split == "test"):
            yield summands


def rows(split: str, size: int, seed: int) -> list[dict[str, str | int]]:
    """Return `size` rows of a split with `question`, `answer` and the number of carries, `carried`."""
    return [
        {"question": f"{a} + {b}", "answer": str(a + b), "carried": (a % 10 + b % 10 > 9) + (a + b > 99)}
        for a, b in islice(sums(split, seed), size)
    ]
