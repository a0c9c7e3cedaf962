"""Whether an engine holds the adapter that the policy has, bit for bit, and computes with it."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor

from grpo.generation.vllm.checked_transfer import EVERY, FEWEST, FRACTION, same
from grpo.generation.vllm.shared_weights import fingerprint, share, side_by_side
from grpo.utils.errors import GenerationError

QUANTIZED_EQUAL = 0.95
"""Fraction of the bytes of packed 4-bit weights that have to be equal."""
NOT_APPLIED = "vLLM has generated without the policy's adapter: use engine.lora=merged, or generation=transformers"


def scaled(model: PeftModel, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the weights of a policy's adapter in vLLM's form: in its data type, with `lora_B` scaled in that type.

    Args:
        weights: weights by their names in PEFT's files.
    """
    factors = {
        name.replace("_checkpoint_wrapped_module.", ""): layer.scaling["default"]
        for name, layer in model.named_modules()
        if isinstance(layer, BaseTunerLayer) and "default" in layer.scaling
    }
    found = {}
    for name, weight in weights.items():
        layer, _, which = name.rpartition(".lora_")
        factor = factors[layer] if which.startswith("B") else 1
        found[name] = weight.to(dtype) if factor == 1 else weight.to(dtype) * factor
    return found


class HeldAdapter:
    """An adapter as vLLM's layers hold it.

    Args:
        manager: vLLM's `LoRAModelManager`.
        version: the engine's number of the adapter.
    """

    def __init__(self, manager: Any, version: int) -> None:
        self.manager, self.version = manager, version
        packed = manager.packed_modules.items()
        self.places = {part: (whole, number) for whole, parts in packed for number, part in enumerate(parts)}
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
        whole, number = self.places.get(module, (module, None))
        layer = self.manager.modules.get(whole)
        if layer is None or self.version not in self.manager.lora_index_to_id:
            return None
        slot = self.manager.lora_index_to_id.index(self.version)
        stack = layer.lora_a_stacked if is_first else layer.lora_b_stacked
        if number is None and not is_first:  # one matrix of the policy for all the projections in this layer
            held = torch.cat([part[slot, 0] for part in stack])
        else:
            held = stack[number or 0][slot, 0]
        return held[: shape[0], : shape[1]]


class FrozenWeights:
    """Weights that nothing may write to.

    Args:
        weights: by name.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights, self.before = weights, fingerprint(weights)
        self._random, self._times = random.Random(0), 0

    def changed(self, few: bool = False) -> list[str]:
        """Return the names of those that something has written to.

        Args:
            few: compare some that are drawn anew, and all every 50th time.
        """
        drawn: Sequence[int] = range(len(self.weights))
        if few and self._times % EVERY:
            drawn = self._random.sample(drawn, min(len(drawn), max(FEWEST, len(drawn) // FRACTION)))
        self._times += few
        names = [*self.weights]
        now = fingerprint({names[place]: self.weights[names[place]] for place in drawn})
        return [names[place] for place, found in zip(drawn, now, strict=True) if found != self.before[place]]


class BesideAdapter:
    """Compares the adapter that a colocated engine holds with the policy's, and the frozen weights beside it.

    Args:
        policy: with the adapter.
        engine: vLLM's model.
        shares: whether the policy gets its frozen weights from the engine.
        divided: whether the engine holds a part of each weight.
    """

    def __init__(self, policy: PeftModel, engine: torch.nn.Module, shares: bool, divided: bool) -> None:
        self.policy, self.divided = policy, divided
        self.frozen = FrozenWeights(share(policy, engine) if shares else named(engine))
        self._engine: torch.nn.Module | None = None if divided else engine
        """While its frozen weights have not been compared with the policy's."""

    def differing(self, manager: Any, version: int, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of differing weights, among all weights of the adapter and some frozen weights.

        The first call compares frozen weights with the policy's, if vLLM keeps them in the policy's layout; later calls
        check that they have not changed.

        Args:
            manager: vLLM's `LoRAModelManager`.
            version: the engine's number of the adapter.
            weights: weights of the policy's adapter, by their names in PEFT's files.
        """
        held, wrong = HeldAdapter(manager, version), self.frozen.changed(few=True)
        for name, weight in scaled(self.policy, weights, manager.lora_config.lora_dtype).items():
            found = held.weight(name, weight.shape)
            is_part = found is not None and self.divided and found.shape != weight.shape
            if not is_part and (found is None or found.shape != weight.shape or not same(found, weight)):
                wrong.append(name)
        pairs = side_by_side(self.policy, self._engine) if self._engine else ()
        self._engine = None
        return wrong + [
            name
            for name, weight, rows in pairs
            if rows is not None
            and rows.shape == weight.shape
            and not isinstance(weight, DTensor)
            and not is_float8(rows)
            and not (same_quantized if weight.dtype == torch.uint8 else same)(rows, weight)
        ]

    def check_applied(self, manager: Any, version: int) -> None:
        """Check that an engine has computed all sequences of its last batch with the adapter.

        Raises:
            GenerationError: it has not.
        """
        if applied(manager) != [version]:
            raise GenerationError(NOT_APPLIED)


def is_float8(weight: torch.Tensor) -> bool:
    """Return whether vLLM has quantized a weight (`engine.quantization`), and so no longer has the policy's bits."""
    return weight.is_floating_point() and weight.element_size() == 1


def same_quantized(held: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether packed 4-bit weights come from the same weights, which vLLM quantizes in float16 while loading.

    A weight near the middle of two levels may get the other level: 0.9 % of bytes differ for a policy in bfloat16. With
    other weights nearly all bytes differ.
    """
    return float((held == weight).float().mean()) >= QUANTIZED_EQUAL


def named(engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights that an engine has kept in their layout, by its own names."""
    return {name: weight for name, weight in engine.named_parameters() if weight.numel()}


def applied(manager: Any) -> list[int]:
    """Return the numbers of the adapters of an engine's last batch, 0 for none."""
    return sorted({int(number) for number in manager._last_mapping.prompt_mapping}) if manager._last_mapping else []
