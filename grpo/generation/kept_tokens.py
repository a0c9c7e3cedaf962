"""The tokens that top-k, top-p and min-p keep, with the log-probability of the drawn token.

An engine normalizes log-probabilities over the kept tokens, the policy over all tokens: their ratio would be too small
by the probability of the filtered tokens (huggingface/trl#6789). The trainer therefore computes the policy's
log-probabilities over the kept tokens.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from grpo.utils.errors import GenerationError

WIDEST = 2048
"""Largest number of kept tokens that are known of a token; with more of them its ratio is 1."""
FILTERED = -1e3
"""Log-probability below which a token was filtered: minus infinity, which a server writes as -9999."""


class KeptLogprob(float):
    """A log-probability with the tokens over which it is normalized.

    TRL's turns and dynamic sampling treat it as a number, and it keeps its tokens.

    Args:
        value: log-probability, normalized over the kept tokens.
        kept: the kept tokens.
    """

    def __new__(cls, value: float, kept: Sequence[int] = ()) -> "KeptLogprob":
        return super().__new__(cls, value)

    def __init__(self, value: float, kept: Sequence[int] = ()) -> None:
        self.kept = array("i", kept)  # 4 bytes each: there may be millions


def most_kept(top_k: int | None, vocabulary: int) -> int:
    """Return the number of log-probabilities to request per token: twice top-k, because of ties; 0 without top-k."""
    return min(2 * top_k, vocabulary) if top_k and top_k > 0 else 0


def with_kept(
    completions: Sequence[Sequence[int]], logprobs: Sequence, token_ids: Sequence, asked: int, vocabulary: int
) -> list[list[list[KeptLogprob | None]]]:
    """Return a list with the log-probability of the draw, for each token of the completions.

    The list has None if the engine returned no value, or if it may have kept more tokens than requested.

    Args:
        completions: tokens.
        logprobs: for each of these tokens, the log-probabilities of the most likely tokens.
        token_ids: these most likely tokens.
        asked: number of requested log-probabilities per token.
        vocabulary: size of the vocabulary.
    """

    def drawn(token: int, values: Sequence[float | None], ids: Sequence[int]) -> KeptLogprob | None:
        logps = {name: value for name, value in zip(ids, values, strict=True) if value is not None and value > FILTERED}
        if token not in logps or asked <= len(logps) < vocabulary:
            return None
        return KeptLogprob(logps[token], list(logps))

    return [
        [[drawn(*of_token)] for of_token in zip(*of_completion, strict=True)]
        for of_completion in zip(completions, logprobs, token_ids, strict=True)
    ]


def with_masks(outputs: Sequence[Any]) -> tuple[list[list[list[KeptLogprob | None]]], None]:
    """Return a list with the log-probability of the draw, for each token of vLLM's completions, and None.

    The list has None if more than `WIDEST` tokens were kept.

    Args:
        outputs: vLLM's `RequestOutput`s with sampling masks.
    """

    def logprob_of(token: int, values: Any, kept_tokens: Sequence[int]) -> KeptLogprob | None:
        value = values[token].logprob
        return KeptLogprob(value, kept_tokens) if len(kept_tokens) <= WIDEST and not math.isnan(value) else None

    completions = [completion for output in outputs for completion in output.outputs]
    by_token = [
        zip(completion.token_ids, completion.logprobs, completion.sampling_mask.token_ids, strict=True)
        for completion in completions
    ]
    return [[[logprob_of(*token)] for token in tokens] for tokens in by_token], None


def as_tensor(logprobs: Sequence[Sequence[Any]]) -> torch.Tensor:
    """Return the kept tokens, (completions, length, most), padded with -1.

    Args:
        logprobs: log-probabilities of the tokens of each completion; tokens of tools have no kept tokens.

    Raises:
        GenerationError: the engine does not return the kept tokens.
    """
    if not any(value is None or hasattr(value, "kept") for row in logprobs for value in row):
        raise GenerationError(
            "the engine does not tell which tokens a sampling filter kept: return each log-probability as a "
            "grpo.generation.kept_tokens.KeptLogprob, or use train.vllm_importance_sampling_correction=false"
        )
    rows = [[getattr(value, "kept", ()) for value in row] for row in logprobs]
    most = max((len(tokens) for row in rows for tokens in row), default=0)
    padded = torch.full((len(rows), max(map(len, rows)), max(1, most)), -1, dtype=torch.int32)
    for number, row in enumerate(rows):
        for place, tokens in enumerate(row):
            padded[number, place, : len(tokens)] = torch.tensor(list(tokens), dtype=torch.int32)
    return padded
