"""Findings about the computation: gradients, memory and use of the GPU, and whether vLLM has the policy's weights."""

from itertools import pairwise
from statistics import mean
from typing import Any

from grpo.reporting.findings.base import MIN_STEPS, Finding, often, values
from grpo.rundir.run_dir import Run
from grpo.utils.diagnosis import ADVICE, MISMATCH, mismatch_causes

WAITS = {
    "generate": "generation=vllm_colocate generates many times faster than transformers",
    "reward": "reward.<name>.workers shares the completions of a batch between processes",
    "update": "larger micro-batches, update.max_tokens_per_microbatch, or more completions per step",
}
"""Advice by the phase that takes longest."""


def steps_skipped(run: Run) -> Finding | None:
    """Steps were skipped because their gradient was not finite."""
    skipped = [(step, value) for step, value in values(run, "update/steps_skipped") if value]
    if not skipped:
        return None
    return Finding(
        "steps_skipped",
        "Steps were skipped because their gradient was not finite",
        f"{sum(value for _, value in skipped):.0f} steps, the first of them {skipped[0][0]}",
        f"the completions are in skipped_rows.jsonl; {ADVICE}",
    )


def memory_near_limit(run: Run) -> Finding | None:
    """An update ran out of memory and was repeated, or more than 90 % of the memory was used."""
    retries, evidence = sum(value for _, value in values(run, "update/oom_retries")), list[str]()
    if retries:
        evidence.append(f"{retries:.0f} updates ran out of memory and were repeated with smaller micro-batches")
    limits: dict[str, Any] = {"memory/host_gb": run.plan.get("host_capacity_gb")}
    if "memory/peak_allocated_gb" in run.summary:
        limits["memory/peak_allocated_gb"] = run.plan.get("capacity_gb")
    for name, limit in limits.items():
        used = run.summary.get(name)
        if limit and used and used > 0.9 * limit:
            evidence.append(f"{used:.1f} GiB of {limit:.1f} GiB of {'host' if 'host' in name else 'GPU'} memory used")
    if run.reason.startswith("host memory"):
        evidence.append(run.reason)
    if not evidence:
        return None
    return Finding(
        "memory_near_limit",
        "Memory was nearly used up",
        "; ".join(evidence),
        "python -m grpo.plan with the same arguments shows its components; update.max_tokens_per_microbatch="
        f"{run.config['update'].max_tokens_per_microbatch} bounds the update, "
        "train.vllm_gpu_memory_utilization vLLM's share",
    )


def host_memory_grows(run: Run) -> Finding | None:
    """Host memory has grown in each of the last three quarters of the run, by 2 % and 100 MiB at least."""
    series = values(run, "memory/host_gb")
    quarter = len(series) // 4
    if quarter < MIN_STEPS:
        return None
    levels = [mean(value for _, value in series[start * quarter : (start + 1) * quarter]) for start in range(1, 4)]
    if any(after < 1.02 * before + 0.1 for before, after in pairwise(levels)):
        return None
    steps = series[-1][0] - series[quarter][0]
    rate = (levels[-1] - levels[0]) / (steps * 2 / 3)
    capacity = run.plan.get("host_capacity_gb")
    left = f", which is full after {(capacity - series[-1][1]) / rate:.0f} more" if capacity else ""
    return Finding(
        "host_memory_grows",
        "Host memory grows from step to step",
        f"{levels[0]:.1f}, {levels[1]:.1f} and {levels[2]:.1f} GiB in the last three quarters, {rate * 1024:.0f} MiB "
        f"per step{left}",
        "a reward function or a callback that keeps what it is given is the usual cause; train.save_steps limits what "
        "is lost, and train.resume_from_checkpoint=auto continues with fresh processes",
    )


def fragments(run: Run) -> Finding | None:
    """PyTorch's allocator has reserved a fifth of the GPU's memory more than it has allocated."""
    reserved, allocated = (run.summary.get(f"memory/peak_{kind}_gb") for kind in ("reserved", "allocated"))
    capacity = run.plan.get("capacity_gb")
    if not (reserved and allocated and capacity) or reserved - allocated < 0.2 * capacity:
        return None
    return Finding(
        "fragments",
        "GPU memory is reserved but unallocated",
        f"at the peaks {reserved:.1f} GiB reserved, {allocated:.1f} GiB of them allocated",
        "fragments of PyTorch's allocator: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which is set unless the "
        "environment has another value, vLLM sleeps (train.vllm_enable_sleep_mode) or spans GPUs, or this is WSL2",
    )


def gpu_idle(run: Run) -> Finding | None:
    """The GPU computed less than half of the time."""
    busy = [value for _, value in values(run, "gpu/utilization")]
    if len(busy) < MIN_STEPS or mean(busy) >= 0.5:
        return None
    seconds = {phase: [value for _, value in values(run, f"time/{phase}")] for phase in WAITS}
    longest = max(WAITS, key=lambda phase: sum(seconds[phase]))
    return Finding(
        "gpu_idle",
        "The GPU is idle most of the time",
        f"{mean(busy):.0%} utilization; the longest phase is {longest}, {mean(seconds[longest] or [0]):.1f} s per step",
        WAITS[longest],
    )


def engine_differs(run: Run) -> Finding | None:
    """A check has found that the engine has other weights than the policy."""
    failed = [step for step, is_policy in values(run, "engine/is_policy") if not is_policy]
    if not failed:
        return None
    differences, limits = (dict(values(run, f"engine/{name}")) for name in ("logp_difference", "tolerance"))
    return Finding(
        "engine_differs",
        "Rollouts were made with other weights than those that are trained",
        f"after step {failed[0]} the log-probabilities differ by {differences[failed[0]]:.2g} nats per token; rounding "
        f"makes less than {limits[failed[0]]:g}",
        "see docs/vllm.md, The engine is the policy; generation=transformers does without an engine",
    )


def mismatch(run: Run) -> Finding | None:
    """The log-probabilities of vLLM differ from those of the policy."""
    differences = values(run, "sampling/sampling_logp_difference/mean")
    over = [(step, value) for step, value in differences if value > MISMATCH]
    if not over:
        return None
    return Finding(
        "mismatch",
        "vLLM's log-probabilities differ from the policy's",
        f"{len(over)} of {len(differences)} steps differ by more than {MISMATCH} nats per token, step {over[0][0]} by "
        f"{over[0][1]:.2f}",
        f"likely causes: {'; '.join(mismatch_causes(run.config.train))}",
    )


def sequences_masked(run: Run) -> Finding | None:
    """TRL's mask of extreme importance ratios removes more than a tenth of the tokens."""
    masked = often(run, "sampling/masked_share")
    if not masked:
        return None
    mode = run.config.train.vllm_importance_sampling_mode
    return Finding(
        "sequences_masked",
        f"The importance-sampling mask removes {'sequences' if mode.startswith('sequence') else 'tokens'}",
        f"{masked[1]:.0%} in the last quarter, after {masked[0]:.0%} in the first, have an importance "
        f"ratio beyond the limits of train.vllm_importance_sampling_mode={mode} and do not train the policy",
        "train.vllm_importance_sampling_mode=token_truncate keeps them; the ratio of a sequence is a product over its "
        "tokens, so that long completions leave the limits first, and half precision makes it worse",
    )
