"""Reward models: sequence-classification models with one output, loaded from safetensors, and their input."""

from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import hf_hub_url, try_to_load_from_cache
from huggingface_hub.constants import CONFIG_NAME
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import apply_chat_template, is_conversational

SECONDS = 10.0
"""Limit of a request that asks whether the hub has a model."""


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


def check(model_name_or_path: str = "", revision: str = "main", **others: Any) -> None:
    """Raise a ValueError if a model is neither here nor on the hub: at once, where a download would try for minutes."""
    if not model_name_or_path:
        raise ValueError("name the model: model_name_or_path=…")
    if Path(model_name_or_path).is_dir():
        return
    nowhere = f"{model_name_or_path}: neither a folder of this machine nor a model on the hub"
    try:
        if isinstance(try_to_load_from_cache(model_name_or_path, CONFIG_NAME, revision=revision), str):
            return
        address = hf_hub_url(model_name_or_path, CONFIG_NAME, revision=revision)
        answer = httpx.head(address, timeout=SECONDS, follow_redirects=True)
    except httpx.HTTPError as error:
        reason = f"the hub cannot be reached ({' '.join(str(error).split())})"
        raise ValueError(f"{model_name_or_path}: no folder of this machine, and {reason}; name a folder") from error
    except HFValidationError as error:
        raise ValueError(nowhere) from error
    if answer.status_code == httpx.codes.NOT_FOUND:
        raise ValueError(nowhere)


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
