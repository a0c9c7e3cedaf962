"""Feed-forward layers in tiles of tokens, so that the longest sequence does not decide their memory.

A feed-forward layer computes each token alone. Its tiles therefore give the result of the whole, and in the backward
pass each tile is computed again, as in ALST (2506.13996, section 3.1). Gradients of weights are sums over the tiles.
"""

import inspect
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

NAMES = ("mlp", "feed_forward")
"""Names that transformers gives a dense feed-forward layer."""


def tile_mlps(tokens: int, policy: torch.nn.Module, reference: torch.nn.Module | None = None) -> None:
    """Let each dense feed-forward layer of a policy and its reference compute at most so many tokens at once.

    Mixtures of experts stay as they are: their memory depends on the tokens of each expert.

    Raises:
        ValueError: the policy has no dense feed-forward layers.
    """
    modules = [*policy.named_modules(), *(reference.named_modules() if reference else ())]
    layers = [module for name, module in modules if name.rpartition(".")[2] in NAMES and is_dense(module)]
    if not layers:
        raise ValueError("update.mlp_tile: this policy has no dense feed-forward layers; leave it out")
    for module in layers:
        module.forward = MethodType(partial(in_tiles, tokens), module)


def is_dense(module: torch.nn.Module) -> bool:
    """Return whether a layer takes nothing but its input, and is no mixture of experts."""
    alone = len(inspect.signature(type(module).forward).parameters) == 2  # and `self`
    return alone and not any("expert" in name for name, _ in module.named_modules())


def in_tiles(size: int, module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of a feed-forward layer for (…, tokens, width), computed in tiles of at most `size` tokens."""
    forward: Any = partial(type(module).forward, module)
    rows = hidden[..., 0, 0].numel()
    if rows * hidden.size(-2) <= size:
        return forward(hidden)
    tiles = [tile.contiguous() for tile in hidden.split(max(1, size // rows), dim=-2)]  # GPT-2 views its input
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(forward, tile, use_reentrant=False) for tile in tiles], dim=-2)
    return torch.cat([forward(tile) for tile in tiles], dim=-2)
