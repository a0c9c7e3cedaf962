"""Findings about the computation: gradients, vLLM and memory."""

from typing import Any

from grpo.diagnosis import ADVICE, MISMATCH, mismatch_causes
from grpo.reporting.findings.base import Finding, values
from grpo.runs.run_dir import Run


def steps_skipped(run: Run) -> Finding | None:
    """Steps whose gradient was not finite; none of them changed the policy."""
    skipped = [(step, value) for step, value in values(run, "update/steps_skipped") if value]
    if not skipped:
        return None
    return Finding(
        "steps_skipped",
        "Steps were skipped, as their gradient was not finite",
        f"{sum(value for _, value in skipped):.0f} steps, the first of them {skipped[0][0]}",
        f"the rows are in skipped_rows.jsonl; {ADVICE}",
    )


def mismatch(run: Run) -> Finding | None:
    """VLLM samples with other probabilities than the policy is trained on."""
    differences = values(run, "sampling/sampling_logp_difference/mean")
    over = [(step, value) for step, value in differences if value > MISMATCH]
    if not over:
        return None
    return Finding(
        "mismatch",
        "vLLM's log-probabilities are not the policy's",
        f"{len(over)} of {len(differences)} steps differ by more than {MISMATCH} nats a token, by {over[0][1]:.2f} at "
        f"step {over[0][0]}",
        f"likely causes: {'; '.join(mismatch_causes(run.config.train))}",
    )


def memory_near_limit(run: Run) -> Finding | None:
    """Memory ran out in an update, which was done again in smaller parts, or more than nine tenths of it were used."""
    retries = sum(value for _, value in values(run, "update/oom_retries"))
    told = [f"{retries:.0f} updates ran out of memory and were done again in smaller parts"] if retries else []
    limits: dict[str, Any] = {"memory/host_gb": run.plan.get("host_capacity_gb")}
    if "memory/peak_allocated_gb" in run.summary:
        limits["memory/peak_allocated_gb"] = run.plan.get("capacity_gb")
    for name, limit in limits.items():
        used = run.summary.get(name)
        if limit and used and used > 0.9 * limit:
            told.append(f"{used:.1f} GB of {limit:.1f} GB of {'host' if 'host' in name else 'GPU'} memory used")
    if run.reason.startswith("host memory"):
        told.append(run.reason)
    if not told:
        return None
    return Finding(
        "memory_near_limit",
        "Memory was nearly used up",
        "; ".join(told),
        "python -m grpo.plan with the same arguments says what takes it; update.max_tokens_per_microbatch="
        f"{run.config['update'].max_tokens_per_microbatch} bounds the update, "
        "train.vllm_gpu_memory_utilization vLLM's share",
    )
