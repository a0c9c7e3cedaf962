"""Reward models: sequence-classification models with one output, loaded from safetensors, and their input."""

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import apply_chat_template, is_conversational


def load(
    model_name_or_path: str, dtype: str = "bfloat16", revision: str = "main"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a reward model and its tokenizer; for the arguments see `rewards.model`.

    Raises:
        ValueError: the model does not exist, or has more than one output.
    """
    try:
        options = {"revision": revision, "trust_remote_code": False}
        loading = {"dtype": getattr(torch, dtype), "use_safetensors": True, "output_loading_info": True, **options}
        model, info = AutoModelForSequenceClassification.from_pretrained(model_name_or_path, num_labels=1, **loading)
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **options)
    except (OSError, RuntimeError, AttributeError) as error:
        raise ValueError(f"{model_name_or_path}: {' '.join(str(error).split())}") from error
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"{model_name_or_path}: not a reward model: its files lack {', '.join(missing[:3])}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # it scores the last token before these
    return model.eval(), tokenizer


@cache
def loaded(model_name_or_path: str, dtype: str, revision: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the result of `load`, on the GPU if there is one; once per process."""
    model, tokenizer = load(model_name_or_path, dtype, revision)
    return model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu"), tokenizer


def text_for(prompt: Any, completion: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the input of the model: the conversation by its own chat template, or prompt and completion unchanged."""
    if is_conversational({"prompt": prompt}):
        return apply_chat_template({"messages": prompt + completion}, tokenizer)["text"]
    return prompt + completion
