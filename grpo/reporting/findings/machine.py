"""Findings about the computation: gradients, vLLM and memory."""

from typing import Any

from grpo.diagnosis import ADVICE, MISMATCH, mismatch_causes
from grpo.reporting.findings.base import Finding, values
from grpo.runs.run_dir import Run


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


def memory_near_limit(run: Run) -> Finding | None:
    """An update ran out of memory and was repeated, or more than 90 % of the memory was used."""
    retries = sum(value for _, value in values(run, "update/oom_retries"))
    evidence = (
        [f"{retries:.0f} updates ran out of memory and were repeated with smaller micro-batches"] if retries else []
    )
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
