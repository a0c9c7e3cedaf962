"""Endless problems of a split, drawn from a seed; the common code of the built-in tasks."""

import random
import zlib
from collections.abc import Callable, Iterator
from typing import TypeVar

P = TypeVar("P")


def of_split(draw: Callable[[random.Random], P], key: Callable[[P], object], split: str, seed: int) -> Iterator[P]:
    """Yield problems of a split, `train` or `test`, without end. The splits have no key of a problem in common."""
    rng = random.Random(seed)
    while True:
        drawn = draw(rng)
        held_out = zlib.crc32(str(key(drawn)).encode()) % 10 == 0
        if held_out == (split == "test"):
            yield drawn
