"""Score of a completion by a reward model: a sequence-classification model with one output, as in TRL.

A run loads the model once in the trainer's process, beside the policy; `rewards.check` calls the function.
"""

from collections.abc import Sequence
from typing import Any

import torch

from rewards.scorer import check, loaded, text_for


def model(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    model_name_or_path: str,
    dtype: str = "bfloat16",
    revision: str = "main",
) -> list[float]:
    """Return the model's score of each completion, one at a time.

    Args:
        prompts, completions: texts, or lists of messages.
        model_name_or_path: a folder, or a name on the hub; safetensors alone.
        dtype: data type of its weights and its computation: `float32`, `bfloat16` or `float16`.
        revision: branch, tag or commit on the hub.
    """
    scorer, tokenizer = loaded(model_name_or_path, dtype, revision)
    scores = []
    with torch.inference_mode():
        for prompt, completion in zip(prompts, completions, strict=True):
            text = text_for(prompt, completion, tokenizer)
            inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(scorer.device)
            scores.append(scorer(**inputs).logits[0, 0].item())
    return scores


model.check = check  # type: ignore[attr-defined]
