"""Fingerprints of tensors: whether two differ in any bit, and about by how much, without keeping them.

`bits` is the sum of a tensor's bits, as integers, times factors that depend on their places, modulo 2^64. Integer sums
are exact in any order, so that every device finds the same. `sketch` is a count sketch (Charikar, Chen, Farach-Colton
2002): the values, with signs that depend on their places, added up in 64 sums. The norm of the difference of two
sketches is in expectation the norm of the difference of the tensors, with a standard deviation of about 9 %; of tensors
that differ in a single value it is exact.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

SUMS = 64
"""Length of a sketch."""
CHUNK = 2**22
"""Values at once: the factors of a billion values would take 8 GiB."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes."""
GOLDEN, MIXER = -7046029254386353131, -4658895280553007687
"""Odd 64-bit factors, of the splitmix64 generator."""


class Fingerprint(NamedTuple):
    """Fingerprint of a tensor."""

    bits: int
    norm: float
    sketch: torch.Tensor
    """Float32, (64)."""

    def distance(self, other: "Fingerprint") -> float:
        """Return about the norm of the difference of two tensors, relative to the larger norm."""
        norm = max(self.norm, other.norm)
        return (self.sketch - other.sketch).norm().item() / norm if norm else 0.0


def fingerprints(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Fingerprint]:
    """Return the fingerprints of tensors by their names; the host waits for a GPU once."""
    names, rows = [], []
    for name, tensor in tensors:
        names.append(name)
        rows.append(measured(tensor))
    if not names:
        return {}
    bits = torch.stack([row[0] for row in rows]).tolist()
    sketches = torch.stack([row[1] for row in rows]).cpu()
    norms = torch.stack([row[2] for row in rows]).tolist()
    return {name: Fingerprint(*parts) for name, *parts in zip(names, bits, norms, sketches, strict=True)}


@torch.no_grad()
def measured(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return bits, sketch and norm of a tensor, on its device."""
    flat = tensor.detach().reshape(-1)
    whole = flat.view(INTEGERS[flat.element_size()]) if flat.dtype != torch.bool else flat.to(torch.uint8)
    bits = torch.full((), flat.numel(), dtype=torch.int64, device=flat.device)
    sketch, squares = torch.zeros(SUMS, device=flat.device), torch.zeros((), device=flat.device)
    for start in range(0, flat.numel(), CHUNK):
        part = whole[start : start + CHUNK].long()
        factors = mixed(torch.arange(start, start + len(part), device=flat.device))
        bits += ((part + 1) * (factors | 1)).sum()
        signs = (factors >> 32 & 1) * 2 - 1
        values = flat[start : start + CHUNK].float() * signs
        squares += values.square().sum()
        sketch += torch.nn.functional.pad(values, (0, -len(values) % SUMS)).view(-1, SUMS).sum(0)
    return bits, sketch, squares.sqrt()


def mixed(places: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit hash of each place, as int64."""
    hashed = places * GOLDEN
    hashed = (hashed ^ (hashed >> 31)) * MIXER
    return hashed ^ (hashed >> 29)


def digest(values: Any) -> str:
    """Return a text of 16 characters that differs if any fingerprint, number or text in `values` does."""
    return hashlib.sha256("\n".join(lines(values)).encode()).hexdigest()[:16]


def lines(values: Any) -> Iterator[str]:
    """Return the parts of nested dictionaries and lists as lines."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield f"{name}:"
            yield from lines(value)
    elif isinstance(values, Fingerprint):
        yield f"{values.bits}"
    elif isinstance(values, list | tuple):
        yield f"[{len(values)}"
        for value in values:
            yield from lines(value)
    elif isinstance(values, torch.Tensor):
        yield f"{tuple(values.shape)} {measured(values)[0].item()}"
    else:
        yield repr(values)
