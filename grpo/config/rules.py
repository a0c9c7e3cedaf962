"""Features that do not work together: a table of rules for the configuration and for scripts, each with its message.

`check` reads it before anything is loaded, and the constructor of `ExactGRPOTrainer` for scripts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from grpo import losses
from grpo.config.facts import Facts
from grpo.options import VLLM, steps_in_backward
from grpo.utils.diagnosis import why_biased, why_no_drafts, why_not_generated


class Rule(NamedTuple):
    """A refusal."""

    when: Callable[[Facts], Any]
    """True, or the reason, if the run is refused."""
    message: str
    """A format string of the facts, `f`, and of the reason."""


STALE, DRAFTS, FP8_OF, BEST_OF = (
    "engine.staleness={f.engine.staleness}: ",
    "engine.drafts={f.engine.drafts}: ",
    "engine.quantization={f.engine.quantization}: ",
    "rollout.pass_at_k={f.rollout.pass_at_k}: ",
)


def stale(when: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
    """Return a condition for runs whose rollouts are made while the policy trains."""
    return lambda f: f.engine.staleness and when(f)


def drafted(when: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
    """Return a condition for runs whose engine drafts tokens."""
    return lambda f: f.engine.drafts and when(f)


def quantized_by_vllm(when: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
    """Return a condition for runs whose engine quantizes its weights."""
    return lambda f: f.engine.quantization and when(f)


def best_of(when: Callable[[Facts], Any]) -> Callable[[Facts], Any]:
    """Return a condition for runs that learn by the best of some completions."""
    return lambda f: f.rollout.pass_at_k is not None and when(f)


RULES = (
    # losses and precision
    Rule(lambda f: losses.why_not(f.train), "train.{reason}"),
    Rule(
        lambda f: f.train.fp16 and f.train.bf16,
        "train.fp16=true train.bf16=true: one of them, bf16 if the GPU supports it",
    ),
    Rule(
        lambda f: f.train.fp16 and f.device in ("cpu", "apple"),
        "train.fp16=true: only with CUDA or ROCm is the loss scaled, so that small gradients do not vanish; use "
        "train.fp16=false model.dtype=float32 here",
    ),
    Rule(
        lambda f: f.train.fp16 and not f.adapter and f.dtype != "float32",
        "peft=none: weights in {f.dtype} cannot be trained with train.fp16; use peft=lora or model.dtype=float32",
    ),
    # the update
    Rule(
        lambda f: f.update.gradients_on_host and (f.processes > 1 or f.train.fp16 or "schedule_free" in f.optim),
        "update.gradients_on_host works with one process, in bfloat16 or float32, and not with schedule_free "
        "optimizers; leave it out, or use shard=fsdp2 with several processes",
    ),
    Rule(
        lambda f: f.update.gradients_on_host and steps_in_backward(f.optim),
        "update.gradients_on_host: train.optim={f.optim} steps during the backward pass, and keeps no gradients; "
        "leave it out",
    ),
    Rule(
        lambda f: f.update.activations_on_host and not f.train.gradient_checkpointing,
        "update.activations_on_host offloads the inputs of checkpointed layers; add "
        "train.gradient_checkpointing=true, or leave it out",
    ),
    Rule(
        lambda f: f.train.torch_compile,
        "train.torch_compile=true compiles the whole policy, anew for each length; use update.compile=true, which "
        "compiles its layers once",
    ),
    Rule(
        lambda f: f.train.use_liger_kernel,
        "train.use_liger_kernel=true: TRL will remove it, and it replaces layers after they were compared with TRL's; "
        "use update.compile=true, which fuses their kernels on a GPU",
    ),
    # several processes
    Rule(
        lambda f: f.update.compile is True and f.sharding,
        "update.compile=true: layers whose weights {f.sharding} divides over processes are not compiled; leave it out",
    ),
    Rule(
        lambda f: f.update.mlp_tile and f.sharding == "ZeRO-3",
        "update.mlp_tile: under ZeRO-3 all processes gather a weight at each use, and have different numbers of tiles; "
        "use FSDP2, which gathers whole layers, or leave it out",
    ),
    Rule(
        lambda f: f.train.fsdp and f.train.deepspeed,
        "train.fsdp and train.deepspeed: one of them; shard=fsdp2 or shard=zero3 chooses it",
    ),
    Rule(
        lambda f: (
            f.sharding == "FSDP2"
            and any(word in f.optim for word in ("8bit", "paged", "bnb"))
            and "torch" not in f.optim
        ),
        "train.optim={f.optim}: bitsandbytes cannot step the weights that FSDP2 shards; use adamw_torch, whose state "
        "is sharded too, or shard=zero2 or zero3",
    ),
    # a stream of problems
    Rule(lambda f: f.stream and f.mixture, "mixture: its tasks are read whole, and a stream has no end"),
    Rule(
        lambda f: f.stream and f.train.ignore_data_skip,
        "train.ignore_data_skip=true: a stream resumes at its row; leave it out",
    ),
    Rule(
        lambda f: f.stream and f.rollout.prioritize,
        "rollout.prioritize=true: it takes problems again, and a stream has none twice; leave it out, or use "
        "task.dataset.streaming=false",
    ),
    # who generates
    Rule(
        lambda f: (
            f.rollout.completions_at_once
            and ("vLLM" if f.by_vllm else f.train.use_transformers_continuous_batching and "continuous batching")
        ),
        "rollout.completions_at_once={f.rollout.completions_at_once}: {reason} finds out by itself how many fit; leave "
        "it out, or use generation=transformers train.use_transformers_continuous_batching=false",
    ),
    Rule(
        lambda f: f.engine.share_weights is True and f.generator in ("transformers", "server"),
        "engine.share_weights=true: works with generation=vllm_colocate; use auto",
    ),
    Rule(
        quantized_by_vllm(lambda f: f.generator != "colocated"),
        f"{FP8_OF}works with generation=vllm_colocate; a server quantizes with options of its own",
    ),
    Rule(
        quantized_by_vllm(lambda f: not f.adapter),
        f"{FP8_OF}vLLM quantizes frozen weights, and all weights are trained; use peft=lora",
    ),
    Rule(
        quantized_by_vllm(lambda f: f.quantized),
        f"{FP8_OF}vLLM quantizes like peft.quantization already; use peft=lora, or leave it out",
    ),
    Rule(quantized_by_vllm(lambda f: f.merged), f"{FP8_OF}vLLM would get merged weights, {{reason}}"),
    Rule(
        quantized_by_vllm(lambda f: f.engine.backend != VLLM),
        f"{FP8_OF}an option of vLLM, and engine.backend={{f.engine.backend}} generates",
    ),
    Rule(
        quantized_by_vllm(lambda f: not f.train.vllm_importance_sampling_correction),
        f"{FP8_OF}samples differ from the policy's; add train.vllm_importance_sampling_correction=true",
    ),
    Rule(
        drafted(lambda f: f.generator != "colocated"),
        f"{DRAFTS}works with generation=vllm_colocate; a server drafts with a --speculative-config of its own",
    ),
    Rule(
        drafted(lambda f: f.engine.backend != VLLM),
        f"{DRAFTS}an option of vLLM, and engine.backend={{f.engine.backend}} generates",
    ),
    Rule(drafted(lambda f: f.images), f"{DRAFTS}works with text alone, and the task has images; leave it out"),
    Rule(
        drafted(lambda f: f.train.vllm_tensor_parallel_size > 1),
        f"{DRAFTS}each process decides whether they pay, and train.vllm_tensor_parallel_size="
        "{f.train.vllm_tensor_parallel_size} makes an engine of several; leave one of them out",
    ),
    Rule(
        drafted(lambda f: why_no_drafts(f.train)),
        f"{DRAFTS}vLLM checks no drafts under {{reason}}; leave one of them out",
    ),
    Rule(
        drafted(lambda f: (f.train.top_p < 1) and not f.train.top_k and f.train.vllm_importance_sampling_correction),
        f"{DRAFTS}with train.top_p={{f.train.top_p}} vLLM tells the kept tokens with train.top_k= beside it, 64 for "
        "example; or leave one of them out",
    ),
    Rule(lambda f: f.by_vllm and why_not_generated(f.train), "{reason}"),
    # rollouts of an older policy
    Rule(stale(lambda f: f.images), f"{STALE}works with text alone, and the task has images"),
    Rule(
        stale(lambda f: f.in_process),
        f"{STALE}reward models and a rollout_func would use the device of the policy during its update",
    ),
    Rule(
        stale(lambda f: f.generator != "server"),
        f"{STALE}only a server generates while the policy trains: use generation=vllm_server",
    ),
    Rule(
        stale(lambda f: not f.train.vllm_importance_sampling_correction),
        f"{STALE}rollouts of an older policy need train.vllm_importance_sampling_correction=true",
    ),
    Rule(stale(lambda f: why_biased(f.train, f.tells_kept)), f"{STALE}{{reason}}"),
    Rule(
        stale(lambda f: f.train.num_iterations > 1 or f.slices != f.train.gradient_accumulation_steps),
        f"{STALE}a generation has to be for one step: train.num_iterations=1, without train.steps_per_generation",
    ),
    Rule(
        lambda f: f.by_vllm and why_biased(f.train, f.tells_kept),
        "{reason}; otherwise leave it out, use generation=transformers, or "
        "train.vllm_importance_sampling_correction=false without off_policy_mask_threshold, which also does without "
        "the check that the engine is the policy",
    ),
    # the best of some completions
    Rule(
        best_of(lambda f: not 2 <= f.rollout.pass_at_k < f.train.num_generations),
        f"{BEST_OF}from 2 to train.num_generations={{f.train.num_generations}} less 1; for 1, leave it out",
    ),
    Rule(
        best_of(lambda f: f.train.multi_objective_aggregation != "sum_then_normalize"),
        f"{BEST_OF}the best completion has the largest sum: train.multi_objective_aggregation=sum_then_normalize",
    ),
    Rule(
        best_of(lambda f: f.train.loss_type == "maxrl"),
        f"{BEST_OF}train.loss_type=maxrl divides by the mean reward of single completions; use another loss",
    ),
)


def refusal(facts: Facts) -> str | None:
    """Return the message of the first rule that refuses a run; None if no rule does."""
    for rule in RULES:
        if reason := rule.when(facts):
            return rule.message.format(f=facts, reason=reason)
    return None
