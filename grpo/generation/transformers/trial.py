"""Whether a policy completes prompts in a continuous batch as `generate` does is found by trying.

Two prompts begin, one of their completions ends, a third prompt joins: all completions consist of given tokens, so that
the logits of each token can be compared.
"""

from typing import Any

import torch
from transformers import GenerationConfig

from grpo.generation.transformers.continuous_batch import ContinuousBatch, in_step, read
from grpo.generation.transformers.growing_cache import GrowingCache
from grpo.generation.transformers.static_batch import StaticBatch
from grpo.utils.attention import policy_of, relative_rounding
from grpo.utils.oom import tried

PROMPTS, COMPLETIONS = (5, 3, 4), (4, 1, 3)
"""Tokens of each prompt, and of its completions."""
LENGTH = 10
"""Tokens that are read at once, and in two halves."""
Logits = dict[tuple[int, int], list[torch.Tensor]]
"""By the number of the prompt and the tokens before."""


@torch.no_grad()
def why_not_joined(model: Any, batch: ContinuousBatch | StaticBatch) -> str | None:
    """Return why completions cannot join and leave an empty batch; None if they can."""
    size = policy_of(model).config.get_text_config().vocab_size
    tokens = iter([(number * 7919 + 5) % size for number in range(sum(PROMPTS) + sum(COMPLETIONS) + 2)])
    end, pad = next(tokens), next(tokens)
    prompts = [[next(tokens) for _ in range(length)] for length in PROMPTS]
    texts = [
        [*prompt, *[next(tokens) for _ in range(length - 1)], end]
        for prompt, length in zip(prompts, COMPLETIONS, strict=True)
    ]
    config = GenerationConfig(max_new_tokens=max(COMPLETIONS), do_sample=False, eos_token_id=end, pad_token_id=pad)
    alone, batched = Dictated(texts, pad), Dictated(texts, pad)

    def arguments_of(dictated: Dictated, *places: int) -> dict[str, Any]:
        width = max(PROMPTS[place] for place in places)
        ids = torch.tensor([[pad] * (width - PROMPTS[place]) + prompts[place] for place in places], device=model.device)
        inputs = {"input_ids": ids, "attention_mask": (ids != pad).long()}
        return inputs | {"generation_config": config, "logits_processor": [dictated]}

    def complete() -> None:
        model.generate(**arguments_of(alone, 0, 1, 2))
        most = 0 if in_step(model) else 2
        for places, numbers, left in (((0, 1), [[0, 1], [2]], most), ((2,), [[3, 4]], 0)):
            arguments = arguments_of(batched, *places)
            inputs = {name: arguments.pop(name) for name in ("input_ids", "attention_mask")}
            batch.begin(model, inputs, numbers, left, **arguments)

    _, reason = tried(complete)
    if reason:
        return reason
    if alone.seen.keys() != batched.seen.keys():
        return "its completions have other lengths"
    pairs = [(row, *alone.seen[place]) for place, rows in batched.seen.items() for row in rows]
    return different(model, *(torch.stack(logits) for logits in zip(*pairs, strict=True)))


@torch.no_grad()
def why_not_continued(model: Any) -> str | None:
    """Return why a policy cannot read several tokens after those in a cache, as all at once; None if it can."""
    size = policy_of(model).config.get_text_config().vocab_size
    ids = (torch.arange(2 * LENGTH, device=model.device).view(2, LENGTH) * 7919 + 5) % size
    mask = torch.ones_like(ids).index_put((torch.tensor(1), torch.arange(2)), torch.tensor(0))  # padding of a row
    config = GenerationConfig(max_new_tokens=1, do_sample=False, pad_token_id=0)

    def logits(*ends: int) -> torch.Tensor:
        cache = GrowingCache(model.config)
        return [read(model, cache, ids[:, :end], mask[:, :end], generation_config=config) for end in ends][-1]

    both, reason = tried(lambda: (logits(LENGTH // 2, LENGTH), logits(LENGTH)))
    return reason if both is None else different(model, *both)


def different(model: Any, logits: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Return by how much logits differ, if it is more than rounding."""
    distance = float((logits - expected).norm() / expected.norm())
    return None if distance <= relative_rounding(model) ** 0.5 else f"logits differ by {distance:.1e}"  # never of nan


class Dictated:
    """A processor of logits that notes them, and has each row continue with the tokens of its text.

    Args:
        texts: tokens of prompts and completions, which differ all but for the ends of texts.
        pad: the token of padding, which no text has.
    """

    def __init__(self, texts: list[list[int]], pad: int) -> None:
        self.pad = pad
        self.following = {
            token: (number, length, text[length])
            for number, text in enumerate(texts)
            for length, token in enumerate(text[:-1], start=1)
        }
        self.seen: Logits = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note and replace the scores of the next tokens, (rows, vocabulary)."""
        dictated = torch.full_like(scores, -torch.inf)
        for row, last in enumerate(input_ids[:, -1].tolist()):
            token = self.pad  # of a completion that has ended, on which `generate` computes
            if last in self.following:
                number, length, token = self.following[last]
                self.seen.setdefault((number, length), []).append(scores[row].clone())
            dictated[row, token] = 0.0
        return dictated
