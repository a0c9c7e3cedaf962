"""The tokens that top-k, top-p and min-p have kept, with the log-probability of the one that was drawn from them.

An engine normalizes its log-probabilities over these tokens, the policy its own over all: their ratio would be too
small by the probability of what was filtered (huggingface/trl#6789). So the policy's are computed over the same tokens.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from grpo.utils.errors import GenerationError

FILTERED = -1e3
"""Log-probability below which a token was filtered: minus infinity, which a server writes as -9999."""


class KeptLogprob(float):
    """A log-probability that knows the tokens over which it is normalized.

    As a number it goes through TRL's turns and dynamic sampling, together with what belongs to it.

    Args:
        value: log-probability, normalized over the tokens that were kept.
        kept: these tokens.
    """

    def __new__(cls, value: float, kept: Sequence[int] = ()) -> "KeptLogprob":
        return super().__new__(cls, value)

    def __init__(self, value: float, kept: Sequence[int] = ()) -> None:
        self.kept = array("i", kept)  # 4 bytes each: there may be millions


def most_kept(top_k: int | None, vocabulary: int) -> int:
    """Return for how many tokens an engine is asked, 0 without top-k: that many, and as many that equal the last."""
    return min(2 * top_k, vocabulary) if top_k and top_k > 0 else 0


def with_kept(
    completions: Sequence[Sequence[int]], logprobs: Sequence, token_ids: Sequence, asked: int, vocabulary: int
) -> list[list[list[KeptLogprob | None]]]:
    """Return of each token of completions the log-probability that it was drawn with, as a list of one.

    None where an engine gave none, or where more tokens may have been kept than were asked for.

    Args:
        completions: tokens.
        logprobs: of each of these tokens those of the likeliest ones.
        token_ids: of these likeliest tokens.
        asked: for how many of them.
        vocabulary: tokens that there are.
    """

    def drawn(token: int, values: Sequence[float | None], ids: Sequence[int]) -> KeptLogprob | None:
        kept = {name: value for name, value in zip(ids, values, strict=True) if value is not None and value > FILTERED}
        if token not in kept or asked <= len(kept) < vocabulary:
            return None
        return KeptLogprob(kept[token], list(kept))

    return [
        [[drawn(*of_token)] for of_token in zip(*of_completion, strict=True)]
        for of_completion in zip(completions, logprobs, token_ids, strict=True)
    ]


def as_tensor(logprobs: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return the tokens that were kept, (completions, length, most), padded with -1.

    Args:
        logprobs: of the tokens of each completion, those of tools too, for which none were kept.

    Raises:
        GenerationError: the engine does not tell which ones it has kept.
    """
    if not any(value is None or hasattr(value, "kept") for row in logprobs for value in row):
        raise GenerationError(
            "the engine does not tell which tokens a sampling filter kept: return each log-probability as a "
            "grpo.generation.kept_tokens.KeptLogprob, or use train.vllm_importance_sampling_correction=false"
        )
    kept = [[getattr(value, "kept", ()) for value in row] for row in logprobs]
    most = max((len(tokens) for row in kept for tokens in row), default=0)
    found = torch.full((len(kept), max(map(len, kept)), max(1, most)), -1, dtype=torch.int32)
    for number, row in enumerate(kept):
        for place, tokens in enumerate(row):
            found[number, place, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)
    return found
