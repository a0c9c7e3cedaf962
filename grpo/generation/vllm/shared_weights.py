"""Frozen weights that a policy with LoRA shares with the colocated engine."""

from collections.abc import Iterator

import torch
from peft import PeftModel

from grpo.utils.errors import GenerationError


def share(policy: PeftModel, engine: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Make the frozen weights of a policy views of an engine's, and return them by their names.

    Raises:
        GenerationError: the engine has a weight in another layout, or not at all.
    """
    frozen = {}
    for name, weight, rows in side_by_side(policy, engine):
        if rows is None or rows.shape != weight.shape or rows.dtype != weight.dtype:
            raise GenerationError(f"vLLM holds {name} in another layout: use engine.share_weights=false")
        weight.data = rows
        frozen[name] = weight
    return frozen


def side_by_side(
    policy: PeftModel, engine: torch.nn.Module
) -> Iterator[tuple[str, torch.nn.Parameter, torch.Tensor | None]]:
    """Yield name and value of each frozen weight of a policy, and an engine's rows for it, or None.

    vLLM stacks matrices with the same input (`packed_modules_mapping`: query, key and value; gate and up), and pads
    embeddings.
    """
    engine_weights = {name.replace("base_layer.", ""): weight for name, weight in engine.named_parameters()}
    frozen = {
        name.removeprefix("base_model.model.").replace("base_layer.", ""): weight
        for name, weight in policy.named_parameters()
        if policy.prefix not in name
    }
    packed = getattr(engine, "packed_modules_mapping", {})
    sizes = {name: len(weight) for name, weight in frozen.items()}
    for name, weight in frozen.items():
        view, first = engine_weights.get(name), 0
        owner, _, kind = name.rpartition(".")
        above, _, module = owner.rpartition(".")
        for stacked, parts in packed.items():
            if view is None and module in parts and f"{above}.{stacked}.{kind}" in engine_weights:
                view = engine_weights[f"{above}.{stacked}.{kind}"]
                first = sum(sizes[f"{above}.{part}.{kind}"] for part in parts[: parts.index(module)])
        yield name, weight, None if view is None else view.data[first : first + len(weight)]


def fingerprint(weights: dict[str, torch.Tensor]) -> list[int]:
    """Return a number per weight that changes with any bit of it."""
    bits = (weight.data.view(torch.uint8) if weight.element_size() == 1 else weight.data for weight in weights.values())
    return [int(torch.hash_tensor(weight).view(torch.int64)) for weight in bits]
