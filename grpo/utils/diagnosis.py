"""Thresholds and advice that live warnings and the page share."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig


MISMATCH = 0.1
"""Nats per token; half precision and other kernels alone make 0.01 to 0.05."""

ADVICE = (
    "lower learning_rate, max_grad_norm or adam_beta2, or look at the data: a reward that is infinite or huge, "
    "a completion that is empty or endless"
)
"""Advice against gradients that are not finite."""


HOTTEST = 2.0
"""Largest temperature that vLLM takes."""
UNBIASED = (
    *("max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "request_id"),
)
"""Keys of `generation_kwargs` that leave the probabilities of tokens as they are; vLLM changes them by all others."""


def sampling_filters(train: Any) -> list[str]:
    """Return the settings of a `trl.GRPOConfig`, or its group, that give vLLM's log-probabilities another meaning."""
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": train.temperature}
    kwargs = train.generation_kwargs or {}
    values = {name: getattr(train, name) for name in neutral if name not in kwargs}
    values |= {f"generation_kwargs.{name}": kwargs[name] for name in neutral if name in kwargs}
    active = [f"{key}={value}" for key, value in values.items() if value not in (None, neutral[key.rpartition(".")[2]])]
    active += [f"generation_kwargs.{name}={kwargs[name]}" for name in kwargs if name not in {*neutral, *UNBIASED}]
    regex = train.vllm_structured_outputs_regex
    return active + ([f"vllm_structured_outputs_regex={regex}"] if regex else [])


def why_not_generated(train: Any) -> str | None:
    """Return which of `generation_kwargs` vLLM cannot generate groups with; None if it can, `train` as above."""
    kwargs = train.generation_kwargs or {}
    if (temperature := kwargs.get("temperature", train.temperature)) > HOTTEST:
        return f"train.temperature={temperature:g}: vLLM takes at most {HOTTEST:g}"
    if "seed" in kwargs:
        return "train.generation_kwargs.seed: all completions of a group would be equal; use train.seed"
    if "n" in kwargs:
        return "train.generation_kwargs.n: use train.num_generations"
    if kwargs.get("stop") and train.mask_truncated_completions:
        return (
            "train.generation_kwargs.stop: TRL takes completions that end with a text for truncated, which "
            "train.mask_truncated_completions masks; use stop_token_ids"
        )
    return None


def why_no_drafts(train: Any) -> str | None:
    """Return the setting under which vLLM checks no drafts; None if it does, `train` as above."""
    kwargs = train.generation_kwargs or {}
    settings = {"min_p": train.min_p} | {
        f"generation_kwargs.{name}": kwargs.get(name) for name in ("min_p", "logit_bias")
    }
    return next((f"train.{name}={value}" for name, value in settings.items() if value), None)


def why_biased(train: Any, tells_kept: bool = False) -> str | None:
    """Return why sampling filters bias the ratio of the policy to vLLM (huggingface/trl#6789); None if they do not.

    vLLM normalizes log-probabilities over the tokens that a filter keeps, the policy over all tokens, unless the kept
    tokens are known: vLLM returns a requested number of the most likely tokens, or a mask of those kept.

    Args:
        train: as in `sampling_filters`.
        tells_kept: whether the engine tells the kept tokens without top-k.
    """
    names = sampling_filters(train)
    if not names or not (train.vllm_importance_sampling_correction or train.off_policy_mask_threshold is not None):
        return None
    others = [name for name in names if not name.startswith(("top_p=", "top_k=", "min_p="))]
    if others or not train.vllm_importance_sampling_correction:
        return f"train.{(others or names)[0]}: with vLLM it biases the importance ratio of every token"
    if not (tells_kept or any(name.startswith("top_k=") for name in names)):
        return (
            f"train.{names[0]}: vLLM tells which tokens this filter kept with train.top_k= beside it, 64 for example; "
            "without it from vLLM 0.28 on, colocated on a GPU"
        )
    return None


def mismatch_causes(train: "DictConfig") -> list[str]:
    """Return possible causes of a difference between vLLM's log-probabilities and the policy's, the likeliest first."""
    causes = []
    if train.vllm_mode == "server":
        causes.append("a server with another model, precision or --logprobs-mode: launch/vllm_server.sh")
    causes.append("weights in half precision (model.dtype, train.bf16), most of all with a mixture of experts")
    return [*causes, "a vLLM version that TRL does not know: `make vllm` installs the one that is tested"]
