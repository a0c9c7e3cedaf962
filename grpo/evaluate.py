"""Greedy accuracy on held-out problems."""

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def wilson_interval(correct: int, samples: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of a proportion of `correct` among `samples` > 0.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = correct / samples
    centre = share + z**2 / (2 * samples)
    spread = z * (share * (1 - share) / samples + z**2 / (4 * samples**2)) ** 0.5
    scale = 1 + z**2 / samples
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@torch.no_grad()
def complete(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[Any], length: int) -> list[str]:
    """Continue each prompt, plain or conversational, with the likeliest tokens; at most `length` of them."""
    if isinstance(prompts[0], str):
        inputs = tokenizer(text=prompts, padding=True, padding_side="left", return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
            return_tensors="pt",
            return_dict=True,
        )
    inputs = inputs.to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=length, do_sample=False, temperature=None, top_p=None, top_k=None)
    return tokenizer.batch_decode(tokens[:, inputs["input_ids"].size(1) :], skip_special_tokens=True)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Dataset,
    reward: Callable[..., list[float]],
    length: int,
    batch_size: int,
    console: Console,
) -> dict[str, Any]:
    """Answer every problem once, greedily.

    Args:
        problems: with the columns `prompt` and `answer`.
        reward: gives 1 to a right completion.
        length: the most tokens of a completion.

    Returns:
        `accuracy`, `correct`, `samples`, `interval` (95 %), `decoding`.
    """
    was_training = model.training
    model.eval()
    correct = 0
    starts = range(0, len(problems), batch_size)
    for start in track(starts, "evaluating", console=console, transient=True, disable=not console.is_terminal):
        batch = problems[start : start + batch_size]
        completions = complete(model, tokenizer, batch["prompt"], length)
        correct += sum(score == 1 for score in reward(completions=completions, **batch))
    model.train(was_training)
    return {
        "accuracy": correct / len(problems),
        "correct": correct,
        "samples": len(problems),
        "interval": wilson_interval(correct, len(problems)),
        "decoding": {"do_sample": False, "max_new_tokens": length},
    }
