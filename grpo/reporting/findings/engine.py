"""Findings about vLLM: whether it has the policy's weights, and how far its log-probabilities are from the policy's."""

from statistics import mean

from grpo.reporting.findings.base import Finding, ends, values
from grpo.rundir.run_dir import Run
from grpo.utils.diagnosis import MISMATCH, mismatch_causes


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
    """TRL's mask of extreme importance ratios removes more than a tenth of what was generated."""
    masked = ends(run, "sampling/masked_share")
    if not masked or mean(masked[1]) <= 0.1:
        return None
    mode = run.config.train.vllm_importance_sampling_mode
    return Finding(
        "sequences_masked",
        f"The importance-sampling mask removes {'sequences' if mode.startswith('sequence') else 'tokens'}",
        f"{mean(masked[1]):.0%} in the last quarter, after {mean(masked[0]):.0%} in the first, have an importance "
        f"ratio beyond the limits of train.vllm_importance_sampling_mode={mode} and do not train the policy",
        "train.vllm_importance_sampling_mode=token_truncate keeps them; the ratio of a sequence is a product over its "
        "tokens, so that long completions leave the limits first, and half precision makes it worse",
    )
