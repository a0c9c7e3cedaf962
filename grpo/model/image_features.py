"""Features of images by a frozen tower and projector: computed once for generation, scoring and update.

These phases need the features of the same images, in different combinations with other images.
"""

import hashlib
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from grpo.utils.attention import policy_of

log = logging.getLogger(__name__)
FEATURES = ("pooler_output", "deepstack_features")
"""Outputs of transformers' `get_image_features`: features of the last layer, and of lower layers (Qwen3-VL)."""
Unit = dict[str, torch.Tensor]
"""The arguments of `get_image_features` for an image, or for a row of images."""


def keep_image_features(model: torch.nn.Module, most: int) -> None:
    """Let a model compute the features of an image once, if none of their weights is trained.

    Args:
        model: a policy that is neither sharded nor has dropout in its tower; others stay as they are.
        most: images whose features stay on the device.
    """
    owners = [module for module in model.modules() if "get_image_features" in dir(type(module))]
    language = {id(weight) for weight in policy_of(model).get_decoder().parameters()}
    if not owners or drops(model.config):
        return
    # not by the features themselves: the first may be those of a reference, that is with adapters off
    if not any(weight.requires_grad and id(weight) not in language for weight in owners[-1].parameters()):
        owners[-1].get_image_features = KeptFeatures(owners[-1].get_image_features, most)


def drops(config: Any) -> bool:
    """Return whether a tower has dropout, with which features differ from call to call."""
    vision = getattr(config, "vision_config", None)
    return any("drop" in name and value for name, value in (vision.to_dict() if vision else {}).items())


class KeptFeatures:
    """Replaces a model's `get_image_features`.

    It tests whether it can: if features depend on a trained weight, or if the features of several images differ from
    those of the single images, the model computes them as before.
    """

    def __init__(self, compute: Callable[..., Any], limit: int) -> None:
        self.compute, self.limit = compute, limit
        self.applies, self.tried = True, False
        self.__signature__ = inspect.signature(compute)  # from which `generate` takes its arguments
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the features of images as `get_image_features` does, in a `ModelOutput`."""
        if not self.applies or torch.is_inference_mode_enabled():  # whose tensors have no place in a backward pass
            return self.compute(*args, **kwargs)
        bound = self.__signature__.bind_partial(*args)
        units, others = divided({**bound.arguments, **kwargs})
        outputs = [self._of(unit, others) for unit in units]
        if self.applies and not self.tried and len(units) > 1:
            self.tried, self.applies = True, are_alike(joined(outputs), self.compute(*args, **kwargs))
        if self.applies:
            return joined(outputs)
        self._kept.clear()
        return self.compute(*args, **kwargs)

    def _of(self, unit: Unit, others: dict[str, Any]) -> Any:
        device = unit["pixel_values"].device.type
        key = (digest(unit), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        with torch.enable_grad():
            output = self.compute(**unit, **others)
        features = {name: value for name in FEATURES if (value := getattr(output, name, None)) is not None}
        if any(tensor.requires_grad for tensor in tree_leaves(features)):
            self.applies = False
        if len(self._kept) == self.limit:
            self._kept.popitem(last=False)
        self._kept[key] = type(output)(**features)
        return self._kept[key]


def divided(arguments: dict[str, Any]) -> tuple[list[Unit], dict[str, Any]]:
    """Return the arguments of `get_image_features` for each image, and those that are about all of them."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    pieces = {name: value.split(1) for name, value in tensors.items()}
    if "image_grid_thw" in tensors:  # the Qwens' patches
        pieces["pixel_values"] = tensors["pixel_values"].split(tensors["image_grid_thw"].prod(-1).tolist())
    units = [dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)]
    return units, {name: value for name, value in arguments.items() if name not in tensors}


def joined(outputs: list[Any]) -> Any:
    """Return the features of several images in the form of a single call."""
    names = [name for name in FEATURES if getattr(outputs[0], name, None) is not None]
    return type(outputs[0])(**{name: together([getattr(output, name) for output in outputs]) for name in names})


def together(parts: list[Any]) -> Any:
    """Join tensors of several calls into a tensor, lists of images into a list, and lists of layers layer by layer."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first[0], torch.Tensor):
        return [image for part in parts for image in part]
    return [together(list(layer)) for layer in zip(*parts, strict=True)]


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return all features."""
    return [leaf for name in FEATURES for leaf in tree_leaves(getattr(output, name, None)) if leaf is not None]


def are_alike(mine: Any, plain: Any) -> bool:
    """Return whether the features of two calls are equal within rounding."""
    tensors, others = tensors_of(mine), tensors_of(plain)
    alike = [tensor.shape for tensor in tensors] == [other.shape for other in others] and all(
        (tensor - other).norm() <= torch.finfo(tensor.dtype).eps ** 0.5 * other.norm()
        for tensor, other in zip(tensors, others, strict=True)
    )
    if not alike:
        log.warning("the features of images are computed anew each time: those of several at once differ")
    return alike


def digest(unit: Unit) -> bytes:
    """Return a hash of the values of tensors, and of their shapes."""
    sha = hashlib.sha256()
    for name, value in sorted(unit.items()):
        sha.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.digest()
