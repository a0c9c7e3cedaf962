"""Endless problems of a split, drawn from a seed; what the built-in tasks have in common."""

import random
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar


class Drawn(Protocol):
    """A problem that knows its split."""

    @property
    def held_out(self) -> bool:
        """Whether this is a test problem."""


P = TypeVar("P", bound=Drawn)


def of_split(draw: Callable[[random.Random], P], split: str, seed: int) -> Iterator[P]:
    """Yield problems of a split, `train` or `test`, without end. The splits have no problem in common."""
    rng = random.Random(seed)
    while True:
        drawn = draw(rng)
        if drawn.held_out == (split == "test"):
            yield drawn
