"""Weights and adapters that an engine's process holds, for the comparison with the policy's.

The engine's own `load_weights` determines the place of a weight: `places` calls it with tensors that have a shape and
no content, and records each write instead of executing it. Fused, padded and divided weights of any architecture are
thus compared without a table of their layouts.
"""

import json
import logging
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode

from grpo.generation.vllm.shared_weights import fingerprint

log = logging.getLogger(__name__)
EVERY = 50
"""All weights are compared completely after the first transfer and after every this many transfers."""
FRACTION, FEWEST = 16, 8
"""After each transfer, a fraction of 1/FRACTION of the weights, at least FEWEST, is compared completely."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """A weight that an engine holds, or a part of it, or some of its rows."""

    name: str
    """The policy's."""
    content: torch.Tensor | str
    """The engine's, in its data type; from a server its digest."""
    dtype: torch.dtype
    shape: torch.Size
    """Shape of the part in the engine, with all of its rows."""
    offset: int
    """Offset of the part's first entry in the policy's weight, which is contiguous."""
    stride: tuple[int, ...]
    """Place of the part in the policy's weight."""
    is_rows: bool = False
    """Whether `content` has only the requested rows."""

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this part of a whole weight of the policy."""
        return weight.contiguous().as_strided(self.shape, self.stride, self.offset)

    def equals(self, weight: torch.Tensor) -> bool:
        """Return whether the content is a weight of the policy in the engine's data type, bit for bit."""
        return holds(self.content, weight.to(self.dtype))

    def rows_of(self, shape: torch.Size, first: int) -> tuple[slice, slice]:
        """Return which rows of the part are those of a weight, and which of those; none if its rows are incomplete.

        Args:
            shape: (rows, ...) of the rows of the policy's weight.
            first: index of the first row in the weight.
        """
        entries = shape[1:].numel()
        if self.shape[1:] != shape[1:] or self.offset % entries or self.stride[0] != entries:
            return slice(0), slice(0)
        start = self.offset // entries
        low, high = max(first, start), min(first + shape[0], start + self.shape[0])
        return slice(low - start, max(low, high) - start), slice(low - first, max(low, high) - first)


class Writes(TorchDispatchMode):
    """Context that records copies from tensors without content instead of executing them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and args[1].is_meta:
            self.copies.append((args[0], args[1]))
            return args[0]
        if function is torch.ops.aten.fill_.Scalar:  # rows below a vocabulary, which are zero
            return args[0]
        return function(*args, **(kwargs or {}))


def places(engine: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, list[Part]]:
    """Return the parts of an engine's weights, by the names under which it gets them.

    The result lacks weights that the engine converts, weights under another name, scalars, and weights after a weight
    whose content the loading of this model reads.

    Args:
        engine: vLLM's model.
        shapes: shapes of the weights by name.
    """
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items() if shape.numel() > 1}
    names = {weight.untyped_storage()._cdata: name for name, weight in empty.items()}
    storages = {weight.untyped_storage().data_ptr() for weight in (*engine.parameters(), *engine.buffers())}
    with Writes() as writes:
        try:
            engine.load_weights(empty.items())
        except (RuntimeError, NotImplementedError) as error:  # it computes with the content
            log.warning("vLLM's loading of this model cannot be followed (%s): not all weights are compared", error)
    parts: dict[str, list[Part]] = {}
    for held, written in writes.copies:
        name = names.get(written.untyped_storage()._cdata)
        if name and held.shape == written.shape and held.untyped_storage().data_ptr() in storages:
            part = Part(name, held, held.dtype, held.shape, written.storage_offset(), written.stride())
            parts.setdefault(name, []).append(part)
    return parts


class HeldWeights:
    """Weights of an engine's model, which the policy's replace.

    Args:
        engine: vLLM's model.
    """

    def __init__(self, engine: torch.nn.Module) -> None:
        self.engine = engine
        self._places: dict[str, list[Part]] = {}

    def __call__(
        self, shapes: Mapping[str, torch.Size], whole: Collection[str], rows: Mapping[str, Sequence[int]]
    ) -> list[Part]:
        """Return what the engine holds of some weights, as views.

        Args:
            shapes: of all weights by name; where they are is looked up anew if all are to be compared.
            whole: names of weights to compare completely.
            rows: first row and number of rows to compare, by name.
        """
        if not self._places or len(whole) == len(shapes):
            self._places = places(self.engine, shapes)
        answer = [part for name in whole for part in self._places.get(name, ())]
        for name, (first, count) in rows.items():
            for part in self._places.get(name, ()):
                held, _ = part.rows_of(torch.Size((count, *shapes[name][1:])), first)
                answer.append(replace(part, content=part.content[held], is_rows=True))
        return answer


class HeldAdapter:
    """An adapter as vLLM's layers hold it.

    Args:
        manager: vLLM's `LoRAModelManager`.
        version: the engine's number of the adapter.
    """

    def __init__(self, manager: Any, version: int) -> None:
        self.manager, self.version = manager, version
        packed = manager.packed_modules.items()
        self.places = {part: (stacked, number) for stacked, parts in packed for number, part in enumerate(parts)}
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        self.mapper = mapper.get_rename_mapper() if mapper else None

    def weight(self, name: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Return a weight of the adapter, (rows, columns), fewer of both if it is divided; None if there is none.

        Args:
            name: in PEFT's files.
            shape: of the policy's.
        """
        from vllm.lora.utils import parse_fine_tuned_lora_name

        module, is_first = parse_fine_tuned_lora_name(name, self.mapper)
        stacked, number = self.places.get(module, (module, None))
        layer = self.manager.modules.get(stacked)
        if layer is None or self.version not in self.manager.lora_index_to_id:
            return None
        slot = self.manager.lora_index_to_id.index(self.version)
        stack = layer.lora_a_stacked if is_first else layer.lora_b_stacked
        if number is None and not is_first:  # one matrix of the policy for all the projections in this layer
            held = torch.cat([part[slot, 0] for part in stack])
        else:
            held = stack[number or 0][slot, 0]
        return held[: shape[0], : shape[1]]

    def weights(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Return the adapter's weights by their names in PEFT's files; those that it lacks are missing."""
        weights = {name: self.weight(name, shape) for name, shape in shapes.items()}
        return {name: weight for name, weight in weights.items() if weight is not None}


class FrozenWeights:
    """Weights that nothing may write to.

    Args:
        weights: by name.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights, self.before = weights, fingerprint(weights)
        self._random, self._times = random.Random(0), 0

    def changed(self, sampled: bool = False) -> list[str]:
        """Return the names of those that something has written to.

        Args:
            sampled: compare some that are drawn anew, and all every 50th time.
        """
        drawn: Sequence[int] = range(len(self.weights))
        if sampled and self._times % EVERY:
            drawn = self._random.sample(drawn, min(len(drawn), max(FEWEST, len(drawn) // FRACTION)))
        self._times += sampled
        names = [*self.weights]
        now = fingerprint({names[place]: self.weights[names[place]] for place in drawn})
        return [names[place] for place, number in zip(drawn, now, strict=True) if number != self.before[place]]


class TellsWeights:
    """Methods of a server's worker in addition to vLLM's own; they read weights and write none.

    Each method takes an object as JSON, because vLLM passes no other argument.
    """

    model_runner: Any
    _frozen: FrozenWeights | None = None

    def held_weights(self, request: str) -> list[dict[str, Any]]:
        """Return the parts that `HeldWeights` returns for a request, with digests as their contents."""
        wanted = json.loads(request)
        shapes = {name: torch.Size(shape) for name, shape in wanted["shapes"].items()}
        parts = HeldWeights(self.model_runner.model)(shapes, wanted["whole"], wanted["rows"])
        return [
            vars(part) | {"content": digest(part.content), "dtype": name_of(part.dtype), "shape": list(part.shape)}
            for part in parts
        ]

    def held_adapter(self, request: str) -> dict[str, Any]:
        """Return digests of the worker's newest adapter, and the frozen weights that changed since the last request.

        Args:
            request: `shapes` of the adapter's weights, by their names in PEFT's files.
        """
        manager = adapters_of(self.model_runner)
        self._frozen = self._frozen or FrozenWeights(named(self.model_runner.model))
        newest = max((number for number in manager.lora_index_to_id if number), default=0)
        weights = HeldAdapter(manager, newest).weights(json.loads(request)["shapes"])
        return {
            "dtype": name_of(manager.lora_config.lora_dtype),
            "held": {name: [list(weight.shape), digest(weight)] for name, weight in weights.items()},
            "changed": self._frozen.changed(sampled=True),
        }

    def applied_adapters(self, request: str) -> list[int]:
        """Return the numbers of the adapters of the worker's last batch, 0 for none."""
        return applied(adapters_of(self.model_runner))


def holds(content: torch.Tensor | str, weight: torch.Tensor) -> bool:
    """Return whether an engine's content, or its digest, is a weight of the policy in the engine's data type."""
    if isinstance(content, str):
        return content == digest(weight)
    kind = INTEGERS[content.element_size()]
    bits = weight.to(content.device, content.dtype).detach().contiguous().view(kind)
    return torch.equal(content.detach().contiguous().view(kind), bits)


def digest(weight: torch.Tensor) -> str:
    """Return a hash of the bits of a weight."""
    content = weight.detach().contiguous().cpu().view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(content)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a data type, as JSON can have it."""
    return str(dtype).removeprefix("torch.")


def named(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that an engine has kept in their layout, by the engine's names."""
    return {name: weight for name, weight in engine.named_parameters() if weight.numel()}


def adapters_of(runner: Any) -> Any:
    """Return the `LoRAModelManager` of vLLM's `GPUModelRunner`."""
    return runner.lora_manager._adapter_manager


def applied(manager: Any) -> list[int]:
    """Return the numbers of the adapters of an engine's last batch, 0 for none."""
    return sorted({int(number) for number in manager._last_mapping.prompt_mapping}) if manager._last_mapping else []
