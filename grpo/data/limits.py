"""Limits of a model on the tokens of a run: an embedding for each, and positions for a prompt and its completion."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from transformers import PretrainedConfig

from grpo.data.task import prompt_lengths
from grpo.utils.errors import ConfigError

SOME = 64
"""Prompts, the longest by characters, among which the longest by tokens is searched."""


def check_limits(
    config: PretrainedConfig,
    processing_class: Any,
    splits: Sequence[Dataset],
    completion: int,
    prompt: int | None = None,
) -> str | None:
    """Return a warning if prompts and completions have more tokens than the model has rotary positions.

    The weights of the model are not read.

    Args:
        config: of the model.
        splits: the problems.
        completion, prompt: tokens of the longest; without `prompt` that of the problems.

    Raises:
        ConfigError: they have more than its learned positions, or a token that is used has no embedding.
    """
    config = config.get_text_config()
    prompts = [prompt for split in splits for prompt in split.with_format(None)["prompt"][:]]
    check_tokens(config.vocab_size, processing_class, prompts)
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    if prompt is None:
        longest = sorted(prompts, key=lambda prompt: len(str(prompt)))[-SOME:]
        of_a_kind = [[prompt for prompt in longest if isinstance(prompt, str) is plain] for plain in (True, False)]
        prompt = max(length for alike in of_a_kind for length in prompt_lengths(alike, processing_class))
    if prompt + completion <= positions:
        return None
    reason = (
        f"prompts of up to {prompt} and completions of up to {completion} tokens; the model has {positions} positions"
    )
    if hasattr(config, "rope_parameters"):
        return f"{reason}: it was not trained on longer texts"
    raise ConfigError(f"{reason}: lower train.max_completion_length={completion}, or task.max_prompt_length, a filter")


def check_tokens(embeddings: int, processing_class: Any, prompts: Sequence[Any]) -> None:
    """Check that the model has an embedding for each token of prompts, template and padding; others may have none.

    Raises:
        ConfigError: a token has none.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    beyond = {token: number for token, number in tokenizer.get_vocab().items() if number >= embeddings}
    special = (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token)
    text = " ".join(map(str, [processing_class.chat_template, *prompts])) if beyond else ""
    for token, number in beyond.items():
        if token in special or token in text:
            raise ConfigError(
                f"model.model_name_or_path: the tokenizer has the token {token} ({number}), and the model {embeddings} "
                f"embeddings (0 to {embeddings - 1}): tokenizer and model do not belong together"
            )
