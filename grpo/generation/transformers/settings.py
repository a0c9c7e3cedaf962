"""The generation config of completions: what is asked for, and of the model's own nothing but its special tokens."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig

from grpo.utils.attention import policy_of
from grpo.utils.patching import replaced

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
BY_ROW = {
    *(*TOKENS, "max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature"),
    *("top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("no_repeat_ngram_size", "suppress_tokens", "bad_words_ids", "sequence_bias", "forced_eos_token_id"),
    *("renormalize_logits", "remove_invalid_values", "disable_compile", "transformers_version", "use_cache"),
}
"""Fields of a generation config by which each row is completed for itself, at each token anew."""


def settings_of(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate` as a generation config, and others that it does not know.

    Args:
        model: its special tokens are those of its own config, unless `options` has others.
        options: a `generation_config`, or fields of one.
    """
    others = {name: value for name, value in options.items() if name != "generation_config"}
    config = copy.deepcopy(options.get("generation_config"))
    if config is None:
        config = GenerationConfig(**{name: getattr(model.generation_config, name) for name in TOKENS})
    unknown = config.update(**others)
    if config.cache_implementation == "dynamic":  # the usual one, beside which `generate` takes no other
        config.cache_implementation = None
    return {"generation_config": config, **unknown}


@contextmanager
def only(model: Any, config: GenerationConfig) -> Iterator[None]:
    """While inside, `generate` fills what a config leaves open with defaults, not from the model's own config.

    Rollouts, scores, evaluations and engines then have one policy, whatever `generation_config.json` says.
    """
    with replaced(policy_of(model), "generation_config", config):
        yield


def why_not_by_row(config: GenerationConfig) -> str | None:
    """Return why completions that share a batch may not be completed as `generate` does, or None."""
    if config.use_cache is False:
        return "its generation_config has use_cache=False"
    return next((f"its generation_config has {name}={of}" for name, of in chosen(config) if name not in BY_ROW), None)


def chosen(config: GenerationConfig) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the fields that are not at their defaults, or at 1, which changes nothing."""
    for name, value in config.to_diff_dict().items():
        if value not in (None, False) and (value is True or value != 1):
            yield name, value


def why_asked(model: Any) -> str | None:
    """Return why a policy's own `generate` has to be called as it is, or None where it is transformers'."""
    for asked in (model, policy_of(model)):
        module = getattr(asked.generate, "__module__", None) or ""
        if module != "transformers.generation.utils" and not module.startswith("peft."):
            return "its `generate` is not transformers'"
    return None


def decoding(model: Any, processing_class: Any, length: int, temperature: float) -> dict[str, Any]:
    """Return arguments of `generate` for the likeliest completion, or for a draw at a temperature above 0.

    Completions end as those of rollouts.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    ends = {"eos_token_id": ends_of(model, tokenizer), "pad_token_id": tokenizer.pad_token_id}
    draw = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    return settings_of(model, {"max_new_tokens": length} | ends | draw)


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a completion, as TRL has them: the tokenizer's, and all that the model names."""
    named = model.generation_config.eos_token_id
    ends = [named] if isinstance(named, int) else list(named or ())
    return ends if tokenizer.eos_token_id in (None, *ends) else [tokenizer.eos_token_id, *ends]
