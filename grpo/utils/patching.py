"""Replacing a name of a library for a while; each place that does so says why."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """While inside, a name of a module is something else."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
