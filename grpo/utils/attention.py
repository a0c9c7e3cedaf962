"""The attention of a policy's language model, replaced for a while through transformers' `AttentionInterface`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from grpo.utils.patching import replaced


def policy_of(model: Any) -> PreTrainedModel:
    """Return transformers' model within wrappers of PEFT, accelerate and DeepSpeed."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def implementations(model: Any) -> dict[str, list[Any]]:
    """Return the names of a language model's attention implementations, each with the configurations that have it."""
    decoder = policy_of(model).get_decoder()
    configs = {id(module.config): module.config for module in decoder.modules() if hasattr(module, "config")}
    by_name = dict[str, list[Any]]()
    for config in configs.values():
        if name := getattr(config, "_attn_implementation", None):
            by_name.setdefault(name, []).append(config)
    return by_name


@contextmanager
def attention_by(model: Any, prefix: str, attend: Callable[..., Any], make_mask: Callable[..., Any]) -> Iterator[None]:
    """While inside, a language model calls these functions for its attention and for its masks.

    Args:
        model: with the language model.
        prefix: of the names under which transformers knows the functions.
        attend: takes the name of the implementation that the model had before, and what that takes.
        make_mask: takes the name, too, and what a function of `AttentionMaskInterface` takes.
    """
    with ExitStack() as stack:
        for name, configs in implementations(model).items():
            if not name.startswith(prefix):
                AttentionInterface.register(prefix + name, with_name(attend, name))
                AttentionMaskInterface.register(prefix + name, with_name(make_mask, name))
                for config in configs:
                    stack.enter_context(replaced(config, "_attn_implementation", prefix + name))
        yield


@cache
def with_name(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function with its first argument, always the same object, as compiled layers remember it."""
    return partial(function, name)


def as_computed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type of autocast, where that is on, as `scaled_dot_product_attention` takes it."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def relative_rounding(model: Any) -> float:
    """Return the relative rounding of scores: of the type that a policy computes with, or float32's if that is less."""
    policy = policy_of(model)
    device = policy.device.type
    computed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else policy.dtype
    return max(torch.finfo(dtype).eps for dtype in (computed, torch.float32))
