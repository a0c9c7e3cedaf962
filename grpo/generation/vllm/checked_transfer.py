"""Compares an engine's weights with the policy's, bit for bit in the engine's data type.

A colocated engine shows its tensors, a server tells their digests (`held_weights.py`); all else is the same.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.distributed.tensor import DTensor

from grpo.generation.vllm.held_weights import EVERY, FEWEST, FRACTION, FrozenWeights, HeldAdapter, Part, holds, named
from grpo.generation.vllm.shared_weights import share, side_by_side

log = logging.getLogger(__name__)
SAMPLE = 2**14
"""Number of sent entries per weight that are kept and compared."""
QUANTIZED_EQUAL = 0.95
"""Fraction of the bytes of packed 4-bit weights that have to be equal."""
NOT_APPLIED = "vLLM has generated without the policy's adapter: use engine.lora=merged, or generation=transformers"


def lost(names: list[str]) -> str:
    """Return the reason that ends a run because its engine holds other weights than the policy."""
    more = len(set(names)) - 1
    which = f"{min(names)} and {more} more differ" if more else f"{min(names)} differs"
    return (
        f"the engine does not hold the policy's weights: {which}; a transfer was lost, or something else was written "
        "there: continue from the checkpoint (train.resume_from_checkpoint=auto), and if it happens again, use "
        "generation=transformers"
    )


class CheckedTransfer:
    """Compares an engine's weights with the policy's after each transfer of all weights.

    It compares a sample of the entries of all weights with the sent values, so that no weight is lost in transfer, and
    some weights completely with the policy's, computed again, so that the sent values are the policy's.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)  # the same on all processes
        self._transfers = 0
        self._shapes: dict[str, torch.Size] = {}
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
        self,
        held: Callable[..., Iterable[Part]] | None,
        policy: Callable[[set[str]], Iterable[tuple[str, torch.Tensor]]],
    ) -> list[str]:
        """Return the names of weights that the engine holds otherwise than the policy.

        Args:
            held: returns the engine's parts, see `HeldWeights`; None on processes that do not ask.
            policy: yields weights of the policy as they are now; all processes have to call it.
        """
        if not self._shapes:
            return ["every weight"]  # as none was ever sent
        drawn, parts = self._drawn(), defaultdict[tuple[str, bool], list[Part]](list)
        if held:
            rows = {name: (first, len(sent)) for name, (first, sent) in self._sent.items()}
            for part in held(shapes=self._shapes, whole=sorted(drawn), rows=rows):
                parts[part.name, part.is_rows].append(part)
            if self._transfers == 1 and not parts:
                log.warning(
                    "it is not known where vLLM keeps the weights of this model, so that none is compared; the check "
                    "by log-probabilities every 50th step remains"
                )
        wrong = {
            name for name, weight in policy(drawn) for part in parts[name, False] if not part.equals(part.of(weight))
        }
        for name, (first, sent) in self._sent.items():
            for part in parts[name, True]:
                _, rows_of_part = part.rows_of(sent.shape, first)
                if not part.equals(sent[rows_of_part]):
                    wrong.add(name)
        self._sent.clear()
        return sorted(wrong)

    def _drawn(self) -> set[str]:
        """Return the names of the weights that are compared as a whole after this transfer."""
        names, is_whole = sorted(self._shapes), self._transfers % EVERY == 0
        self._transfers += 1
        count = min(len(names), max(FEWEST, len(names) // FRACTION))
        return set(names if is_whole else self._random.sample(names, count))


class CheckedAdapter:
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
        held = HeldAdapter(manager, version).weights({name: weight.shape for name, weight in weights.items()})
        contents = {name: (weight.shape, weight) for name, weight in held.items()}
        wanted = scaled(self.policy, weights, manager.lora_config.lora_dtype)
        wrong = self.frozen.changed(sampled=True) + differing_adapter(wanted, contents, self.divided)
        pairs = side_by_side(self.policy, self._engine) if self._engine else ()
        self._engine = None
        return wrong + [
            name
            for name, weight, rows in pairs
            if rows is not None
            and rows.shape == weight.shape
            and not isinstance(weight, DTensor)
            and not is_float8(rows)
            and not (
                same_quantized(rows, weight) if weight.dtype == torch.uint8 else holds(rows, weight.to(rows.dtype))
            )
        ]


def differing_on_server(
    policy: PeftModel, weights: Mapping[str, torch.Tensor], answers: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the names of adapter weights that differ on a server, and of frozen weights that have changed.

    Args:
        weights: weights of the adapter, by their names in PEFT's files.
        answers: of the workers to `TellsWeights.held_adapter`.
    """
    wrong = []
    for answer in answers:
        wanted = scaled(policy, weights, getattr(torch, answer["dtype"]))
        contents = {name: (torch.Size(shape), content) for name, (shape, content) in answer["held"].items()}
        wrong += differing_adapter(wanted, contents, divided=len(answers) > 1) + answer["changed"]
    return wrong


def differing_adapter(
    wanted: Mapping[str, torch.Tensor], held: Mapping[str, tuple[torch.Size, torch.Tensor | str]], divided: bool
) -> list[str]:
    """Return the names of an adapter's weights that an engine lacks or holds otherwise.

    Args:
        wanted: in vLLM's form, see `scaled`.
        held: shape and content of the engine's.
        divided: whether several processes divide weights; these parts are not compared.
    """
    wrong = []
    for name, weight in wanted.items():
        shape, content = held.get(name, (None, ""))
        if shape != weight.shape:
            wrong += [] if divided and shape else [name]
        elif not holds(content, weight):
            wrong.append(name)
    return wrong


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
    result = {}
    for name, weight in weights.items():
        layer, _, which = name.rpartition(".lora_")
        factor = factors[layer] if which.startswith("B") else 1
        result[name] = weight.to(dtype) if factor == 1 else weight.to(dtype) * factor
    return result


def is_float8(weight: torch.Tensor) -> bool:
    """Return whether vLLM has quantized a weight (`engine.quantization`), and so no longer has the policy's bits."""
    return weight.is_floating_point() and weight.element_size() == 1


def same_quantized(held: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether packed 4-bit weights come from the same weights, which vLLM quantizes in float16 while loading.

    A weight near the middle of two levels may get the other level: 0.9 % of bytes differ for a policy in bfloat16. With
    other weights nearly all bytes differ.
    """
    return float((held == weight).float().mean()) >= QUANTIZED_EQUAL
