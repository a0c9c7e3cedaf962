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


def why_biased(train: Any) -> str | None:
    """Return why sampling filters bias the ratio of the policy to vLLM (huggingface/trl#6789); None if they do not.

    vLLM normalizes log-probabilities over the tokens that a filter keeps, the policy over all tokens, unless the kept
    tokens are known: vLLM returns a requested number of the most likely tokens.

    `train` is as in `sampling_filters`.
    """
    names = sampling_filters(train)
    if not names or not (train.vllm_importance_sampling_correction or train.off_policy_mask_threshold is not None):
        return None
    others = [name for name in names if not name.startswith(("top_p=", "top_k=", "min_p="))]
    if others or not train.vllm_importance_sampling_correction:
        return f"train.{(others or names)[0]}: with vLLM it biases the importance ratio of every token"
    if not any(name.startswith("top_k=") for name in names):
        return f"train.{names[0]}: vLLM tells which tokens this filter kept with train.top_k= beside it, 64 for example"
    return None


def why_not_stale(train: Any, images: bool, in_process: bool) -> str | None:
    """Return why rollouts cannot be made while the policy trains; None if they can.

    `train` is as in `sampling_filters`; `images` tells whether the task has them, `in_process` whether a reward model
    or a script's `rollout_func` works in the process of the policy.
    """
    if images:
        return "works with text alone, and the task has images"
    if in_process:
        return "reward models and a rollout_func would use the device of the policy during its update"
    slices = train.steps_per_generation or train.gradient_accumulation_steps
    if not train.use_vllm or train.vllm_mode != "server":
        return "only a server generates while the policy trains: use generation=vllm_server"
    if not train.vllm_importance_sampling_correction:
        return "rollouts of an older policy need train.vllm_importance_sampling_correction=true"
    if reason := why_biased(train):
        return reason
    if train.num_iterations > 1 or slices != train.gradient_accumulation_steps:
        return "a generation has to be for one step: train.num_iterations=1, without train.steps_per_generation"
    return None


def why_not_best_of(train: Any, rollout: Any) -> str | None:
    """Return why a policy cannot learn by the best of `rollout.pass_at_k` completions; None if it can.

    `train` is as in `sampling_filters`.
    """
    k, asked = rollout.pass_at_k, f"rollout.pass_at_k={rollout.pass_at_k}"
    if k is None:
        return None
    if not 2 <= k < train.num_generations:
        return f"{asked}: from 2 to train.num_generations={train.num_generations} less 1; for 1, leave it out"
    if train.multi_objective_aggregation != "sum_then_normalize":
        return f"{asked}: the best completion has the largest sum: train.multi_objective_aggregation=sum_then_normalize"
    if train.loss_type == "maxrl":
        return f"{asked}: train.loss_type=maxrl divides by the mean reward of single completions; use another loss"
    return None


def mismatch_causes(train: "DictConfig") -> list[str]:
    """Return possible causes of a difference between vLLM's log-probabilities and the policy's, the likeliest first."""
    causes = []
    if train.vllm_mode == "server":
        causes.append("a server with another model, precision or --logprobs-mode: launch/vllm_server.sh")
    causes.append("weights in half precision (model.dtype, train.bf16), most of all with a mixture of experts")
    return [*causes, "a vLLM version that TRL does not know: `make vllm` installs the one that is tested"]
