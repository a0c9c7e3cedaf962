"""The parts of a vision-language model, found by its structure: vision tower, projector, language model."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel

from grpo.config.schema import PARTS
from grpo.utils.errors import ConfigError


def takes_images(architecture: PretrainedConfig) -> bool:
    """Whether models of an architecture take images beside text."""
    return getattr(architecture, "vision_config", None) is not None


def parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return the modules of a model's `vision` tower, and the modules of its `projector`.

    The tower is the module with the vision configuration, the language model the module with the text configuration.
    The projector consists of all other modules in the model that holds both, and of the end of a tower whose features
    are as wide as the language model, such as Qwen's mergers.
    """
    config = model.config
    if not takes_images(config):
        return {part: [] for part in PARTS}
    tower, language = (_with_config(model, part) for part in (config.vision_config, config.get_text_config()))
    ends = [f"{tower}.{name}" for name in _ends(model.get_submodule(tower), config.get_text_config().hidden_size)]
    beside = [
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[0] == tower.rpartition(".")[0]
        and name not in ("", tower, language)
        and any(True for _ in module.parameters())
        and module is not model.get_output_embeddings()
    ]
    stem = [
        f"{tower}.{name}" for name, _ in model.get_submodule(tower).named_children() if f"{tower}.{name}" not in ends
    ]
    return {"vision": stem, "projector": [*beside, *ends]}


def _with_config(model: PreTrainedModel, config: PretrainedConfig) -> str:
    """Return the name of the outermost module that has been built from a part of the configuration."""
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel) and isinstance(module.config, type(config)):
            return name
    raise ConfigError(f"model: no part of {type(model).__name__} has been built from its {type(config).__name__}")


def _ends(tower: torch.nn.Module, width: int) -> list[str]:
    """Return the children of a tower that follow its layers and make features of the language model's width."""
    children = dict(tower.named_children())
    layers = [name for name, child in children.items() if isinstance(child, torch.nn.ModuleList)][:1]
    after = list(children)[list(children).index(layers[0]) + 1 :] if layers else []
    return [
        name
        for name in after
        if any(
            isinstance(module, torch.nn.Linear) and module.out_features == width for module in children[name].modules()
        )
    ]


def freeze(model: PreTrainedModel, frozen: Sequence[str], unused: bool = False) -> None:
    """Freeze parts of a model.

    Args:
        frozen: some of `PARTS`.
        unused: freeze all parts that the model has, as no image reaches them.

    Raises:
        ConfigError: the model lacks a part of `frozen`.
    """
    for part, modules in parts(model).items():
        if part in frozen or unused:
            if part in frozen and not modules:
                raise ConfigError(f"model.freeze: {part}: the model has none; leave it out")
            for name in modules:
                model.get_submodule(name).requires_grad_(False)


def detach_frozen_tower(model: PreTrainedModel) -> None:
    """Exclude a completely frozen tower from the backward pass, and its layers' inputs from memory.

    With checkpointing, transformers makes the outputs of all input embeddings require a gradient, including patch
    embeddings (`enable_input_require_grads`), so autograd would pass through all later layers. The gradients of trained
    weights stay the same.
    """
    tower = [model.get_submodule(name) for name in parts(model)["vision"]]
    if any(weight.requires_grad for module in tower for weight in module.parameters()):
        return
    for layers in chain.from_iterable(module.modules() for module in tower):
        if isinstance(layers, torch.nn.ModuleList) and len(layers):
            layers[0].register_forward_pre_hook(_detached, with_kwargs=True)


def _detached(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
