"""Reward functions of `benchmarks.preflight`: one that helps, and three from which no task can be learned."""

from typing import Any
from zlib import crc32

from rewards.text import final_answer, text_of


def closeness(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return 1 for the correct number, less the further away a number is, and 0 without one."""
    return [close(final_answer(text_of(one)), right) for one, right in zip(completions, answer, strict=True)]


def close(found: str, right: str) -> float:
    """Return 1 over 1 plus the distance of two numbers; 0 for what is none."""
    return 1 / (1 + abs(int(found) - int(right))) if found.isdecimal() else 0.0


def constant(completions: list[Any], **columns: Any) -> list[float]:
    """Return the same for every completion."""
    return [1.0] * len(completions)


def fails(completions: list[Any], **columns: Any) -> list[float]:
    """Fail on every completion."""
    raise ValueError("it always fails")


def noise(completions: list[Any], **columns: Any) -> list[float]:
    """Return 0 or 1 by a checksum of the text, whatever it means."""
    return [float(crc32(text_of(one).encode()) & 1) for one in completions]
