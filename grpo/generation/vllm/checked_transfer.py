"""Compares an engine's weights with the policy's, bit for bit in the engine's data type.

The engine's own `load_weights` determines the place of a weight: the check calls it with tensors that have a shape and
no content, and records each write instead of executing it. Fused, padded and divided weights of any architecture are
thus compared without a table of their layouts.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)
EVERY = 50
"""All weights are compared completely after the first transfer and after every this many transfers."""
FRACTION, FEWEST = 16, 8
"""After each transfer, a fraction of 1/FRACTION of the weights, at least FEWEST, is compared completely."""
SAMPLE = 2**14
"""Number of sent entries per weight that are kept and compared."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """Where an engine keeps a weight, or a part of it."""

    held: torch.Tensor
    """The engine's, in its layout."""
    offset: int
    """Offset of that part's first entry in the policy's weight, which is contiguous."""
    stride: tuple[int, ...]
    """Place of that part in the policy's weight; `held` has its shape."""

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole weight of the policy."""
        return weight.contiguous().as_strided(self.held.shape, self.stride, self.offset)

    def of_rows(self, rows: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the engine's values of some rows of a weight, and the rows; nothing for a part without complete rows.

        Args:
            rows: (rows, ...), rows of a weight of the policy.
            first: index of the first row in the weight.
        """
        entries, shape = rows[0].numel(), self.held.shape
        if shape[1:] != rows.shape[1:] or self.offset % entries or self.stride[0] != entries:
            return self.held[:0], rows[:0]
        start = self.offset // entries
        low, high = max(first, start), min(first + len(rows), start + shape[0])
        return self.held[low - start : max(low, high) - start], rows[low - first : max(low, high) - first]

    def described(self) -> dict[str, Any]:
        """Return all but the content, as JSON can have it."""
        dtype = str(self.held.dtype).removeprefix("torch.")
        return {"shape": list(self.held.shape), "dtype": dtype, "offset": self.offset, "stride": list(self.stride)}


class Writes(TorchDispatchMode):
    """Context that records copies from tensors without content instead of executing them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and args[1].is_meta:
            self.found.append((args[0], args[1]))
            return args[0]
        if function is torch.ops.aten.fill_.Scalar:  # rows below a vocabulary, which are zero
            return args[0]
        return function(*args, **(kwargs or {}))


def digest(weight: torch.Tensor) -> str:
    """Return a hash of the bits of a weight."""
    content = weight.detach().contiguous().cpu().view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(content)


def places(engine: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, list[Place]]:
    """Return the places of weights in an engine, by the names under which it gets them.

    The result lacks weights that the engine converts, weights under another name, scalars, and weights after a weight
    whose content the loading of this model reads.

    Args:
        engine: vLLM's model.
        shapes: shapes of the weights by name.
    """
    given = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if shape.numel() > 1}
    names = {weight.untyped_storage()._cdata: name for name, weight in given.items()}
    own = {weight.untyped_storage().data_ptr() for weight in (*engine.parameters(), *engine.buffers())}
    with Writes() as writes:
        try:
            engine.load_weights(given.items())
        except (RuntimeError, NotImplementedError) as error:  # it computes with the content
            log.warning("vLLM's loading of this model cannot be followed (%s): not all weights are compared", error)
    found: dict[str, list[Place]] = {}
    for held, part in writes.found:
        name = names.get(part.untyped_storage()._cdata)
        if name and held.shape == part.shape and held.untyped_storage().data_ptr() in own:
            found.setdefault(name, []).append(Place(held, part.storage_offset(), part.stride()))
    return found


def same(held: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether an engine holds a weight of the policy, in the engine's data type."""
    wanted = weight.to(held.device, held.dtype)
    kind = INTEGERS[held.element_size()]
    return torch.equal(held.detach().contiguous().view(kind), wanted.detach().contiguous().view(kind))


def lost(names: list[str]) -> str:
    """Return the reason that ends a run because its engine holds other weights than the policy."""
    more = len(set(names)) - 1
    which = f"{min(names)} and {more} more differ" if more else f"{min(names)} differs"
    return (
        f"the engine does not hold the policy's weights: {which}; a transfer was lost, or something else was written "
        "there: continue from the checkpoint (train.resume_from_checkpoint=auto), and if it happens again, use "
        "generation=transformers"
    )


def warn_unless(compared: bool) -> None:
    """Say so if no weight can be compared."""
    if not compared:
        log.warning(
            "it is not known where vLLM keeps the weights of this model, so that none is compared; the check "
            "by log-probabilities every 50th step remains"
        )


class CheckedTransfer:
    """Compares a colocated engine's weights with the policy's after each transfer.

    It compares a sample of the entries of all weights with the sent values, so that no weight is lost in transfer, and
    some weights completely with the policy's, computed again, so that the sent values are the policy's.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)  # the same on all processes
        self._transfers = 0
        self._shapes: dict[str, torch.Size] = {}
        self._places: dict[str, list[Place]] = {}
        self._sent: dict[str, tuple[int, torch.Tensor]] = {}

    def sending(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and weights as they are sent, and keep some rows of each."""
        for name, weight in weights:
            self._shapes[name] = weight.shape
            if weight.dim() and weight.numel():
                count = min(max(1, SAMPLE // weight[0].numel()), len(weight))
                first = self._random.randrange(len(weight) - count + 1)
                self._sent[name] = first, weight[first : first + count].detach().clone()
            yield name, weight

    def differing(
        self, engine: torch.nn.Module, policy: Callable[[set[str]], Iterable[tuple[str, torch.Tensor]]]
    ) -> list[str]:
        """Return the names of weights that the engine holds otherwise than the policy.

        Args:
            engine: vLLM's model.
            policy: yields weights of the policy as they are now; all processes have to call it.
        """
        if not self._shapes:
            return ["every weight"]  # as none was ever sent
        if self._transfers % EVERY == 0:
            self._places = places(engine, self._shapes)
            warn_unless(bool(self._places))
        wrong = {
            name
            for name, weight in policy(self._drawn())
            for place in self._places.get(name, ())
            if not same(place.held, place.of(weight))
        }
        for name, (first, rows) in self._sent.items():
            pairs = [place.of_rows(rows, first) for place in self._places.get(name, ())]
            wrong |= {name for held, kept in pairs if not same(held, kept)}
        self._sent.clear()
        return sorted(wrong)

    def differing_on(
        self, ask: Callable[..., list[Any]] | None, policy: Callable[[set[str]], Iterable[tuple[str, torch.Tensor]]]
    ) -> list[str]:
        """Return the names of weights that differ between server and policy, by digests.

        Args:
            ask: queries the workers of the server; None on processes that do not query it.
            policy: as in `differing`.
        """
        if not self._shapes:
            return ["every weight"]
        drawn, wrong, said = self._drawn(), set(), defaultdict(list)
        if ask:
            rows = {name: [first, len(kept)] for name, (first, kept) in self._sent.items()}
            shapes = {name: list(shape) for name, shape in self._shapes.items()}
            for part in chain(*ask("held_weights", shapes=shapes, whole=sorted(drawn), rows=rows)):
                content = torch.empty(part["shape"], dtype=getattr(torch, part["dtype"]), device="meta")
                place = Place(content, part["offset"], tuple(part["stride"]))
                said[part["name"], part["rows"]].append((place, part["digest"]))
            if self._transfers == 1:
                warn_unless(bool(said))
        for name, weight in policy(drawn):
            parts = [(place.of(weight).to(place.held.dtype), found) for place, found in said[name, False]]
            wrong |= {name for part, found in parts if digest(part) != found}
        for name, (first, kept) in self._sent.items():
            parts = [(place.of_rows(kept, first)[1].to(place.held.dtype), found) for place, found in said[name, True]]
            wrong |= {name for part, found in parts if digest(part) != found}
        self._sent.clear()
        return sorted(wrong)

    def _drawn(self) -> set[str]:
        """Return the names of the weights that are compared as a whole after this transfer."""
        names, is_whole = sorted(self._shapes), self._transfers % EVERY == 0
        self._transfers += 1
        few = min(len(names), max(FEWEST, len(names) // FRACTION))
        return set(names if is_whole else self._random.sample(names, few))
