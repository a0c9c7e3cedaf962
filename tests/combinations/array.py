"""Rows of values in which each pair that can work meets at least once."""

import os
import random
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import covertable

from tests.combinations.features import FEATURES, MEANINGLESS, REFUSED

Row = dict[str, str]
NEVER = [*(pair for pair, _ in REFUSED), *MEANINGLESS]


def never(pair: Mapping[str, str]) -> dict[str, Any]:
    """A constraint of covertable's: these values do not meet."""
    conditions = [{"left": feature, "operator": "eq", "value": value} for feature, value in pair.items()]
    return {"operator": "not", "condition": {"operator": "and", "conditions": conditions}}


def rows() -> list[Row]:
    """All rows, the same ones each time."""
    factors = {feature: list(values) for feature, values in FEATURES.items()}
    return [dict(row) for row in covertable.make(factors, constraints=[never(pair) for pair in NEVER])]


def drawn(candidates: list[Row]) -> list[Row]:
    """Rows by the commit in DRAWN_BY, which `.ci/run` sets: one of eight, at least four; without it all of them."""
    if not (commit := os.environ.get("DRAWN_BY")):
        return candidates
    return random.Random(commit).sample(candidates, max(4, len(candidates) // 8))


def rows_of(shard: str) -> list[Row]:
    """The drawn rows; for a choice of `conf/shard` of as few as have all values.

    Layers of sharded policies are not compiled, and ZeRO-3 refuses tiles.
    """
    if shard == "none":
        return drawn(rows())
    changed = {"layers": "as they are"} | ({"feed-forward": "whole"} if shard == "zero3" else {})
    return [row | changed for row in drawn(few(rows()))]


def few(candidates: list[Row]) -> list[Row]:
    """As few of some rows as have all values that are in them."""
    chosen, missing = list[Row](), {item for row in candidates for item in row.items()}
    while missing:
        chosen.append(max(candidates, key=lambda row: len(missing & row.items())))
        missing -= chosen[-1].items()
    return chosen


def plain(**values: str) -> Row:
    """A row of plain values, but for some."""
    return {feature: next(iter(choices)) for feature, choices in FEATURES.items()} | values


def pairs(row: Mapping[str, str]) -> Iterator[frozenset[tuple[str, str]]]:
    """The pairs of values in a row."""
    return map(frozenset, combinations(row.items(), 2))


def possible() -> set[frozenset[tuple[str, str]]]:
    """All pairs of values that can work."""
    every = [(feature, value) for feature, values in FEATURES.items() for value in values]
    found = {frozenset(pair) for pair in combinations(every, 2) if pair[0][0] != pair[1][0]}
    return found - {frozenset(pair.items()) for pair in NEVER}


def name(row: Row) -> str:
    """The values of a row that are not plain."""
    return ", ".join(value for feature, value in row.items() if value != next(iter(FEATURES[feature])))
