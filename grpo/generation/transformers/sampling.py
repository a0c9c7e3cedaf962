"""Draws tokens by their probabilities."""

import torch
from torch.nn.functional import pad

BLOCK = 128
"""Neighbouring tokens of a vocabulary; most vocabularies are multiples of it."""


def drawn(scores: torch.Tensor) -> torch.Tensor:
    """Return a token of each row, (rows, 1), drawn by the softmax of scores, (rows, vocabulary).

    `torch.multinomial` draws a random number for each token of the vocabulary, on a CPU one after the other. So there a
    block of tokens is drawn by the sum of its probabilities, and then a token of it.

    Raises:
        ValueError: a row has no probabilities, as a logit is NaN or infinite.
    """
    chances = scores.softmax(-1)
    if chances.device.type != "cpu":
        return torch.multinomial(chances, 1)
    missing = -chances.size(1) % BLOCK
    blocks = (pad(chances, (0, missing)) if missing else chances).unflatten(1, (-1, BLOCK))
    block = place(blocks.sum(-1))
    return block * BLOCK + place(blocks.take_along_dim(block[..., None], 1)[:, 0])


def place(weights: torch.Tensor) -> torch.Tensor:
    """Return a place in each row, (rows, 1), drawn by weights, (rows, places)."""
    summed = weights.cumsum(-1, dtype=torch.float64)
    total = summed[:, -1:]
    if not total.isfinite().all():
        raise ValueError("the policy's logits are NaN or infinite, so no token can be drawn")
    return torch.searchsorted(summed, torch.rand_like(total) * total, right=True)
