"""Findings about an engine whose log-probabilities are not those of the trained policy."""

from statistics import fmean

from grpo.extras.doctor.diagnosis import Diagnosis
from grpo.extras.doctor.history import History

GAPS = {
    "sampling/sampling_logp_difference/mean": (0.1, 0.02),
    "rollout_corr/log_ppl_abs_diff": (0.1, 0.02),
    "rollout_corr/k3_kl": (0.05, 0.005),
    "training/rollout_probs_diff_mean": (0.05, 0.02),
}
"""Differences between sampler and trainer: the level that no rounding reaches, and the level from which a rise counts.

Half precision and other kernels make 0.01 to 0.05 nats per token, and k3, about half of the mean squared difference,
0.001 to 0.005.
"""
ADVICE = (
    "the engine samples with other weights than those that are trained: check that weights or the adapter are sent "
    "after each update, that asynchronous rollouts are not older than intended, and that precision, template and "
    "sampling filters agree"
)


def engine_drifts(history: History) -> Diagnosis | None:
    """The difference is three times as large in the last quarter of the run as in the first, and not rounding.

    Stale weights show as a difference that grows with training; rounding does not grow.
    """
    for name, (_, least) in GAPS.items():
        values = [value for _, value in history.values(name)]
        quarter = len(values) // 4
        if quarter < 2:
            continue
        before, after = fmean(values[:quarter]), fmean(values[-quarter:])
        if after >= max(least, 3 * before) and min(values[-quarter:]) > max(values[:quarter]):
            return Diagnosis(
                "engine_drifts",
                "The engine drifts away from the policy",
                f"{name} {before:.3g} in the first quarter of the run, {after:.3g} in the last",
                ADVICE,
            )
    return None


def engine_gap(history: History) -> Diagnosis | None:
    """In the last quarter, a difference is beyond rounding, or the mean importance ratio below 0.5 or above 2."""
    evidence = []
    for name, (most, _) in GAPS.items():
        if name.startswith("sampling/"):  # a finding of the page
            continue
        last = last_quarter(history, name)
        if last is not None and last > most:
            evidence.append(f"{name} {last:.3g}")
    ratio = last_quarter(history, "sampling/importance_sampling_ratio/mean")
    if ratio is not None and not 0.5 <= ratio <= 2:
        evidence.append(f"mean importance ratio {ratio:.3g}")
    if not evidence:
        return None
    return Diagnosis(
        "engine_gap",
        "The engine's probabilities differ from the policy's",
        f"{', '.join(evidence)} in the last quarter of the run",
        ADVICE,
    )


def last_quarter(history: History, name: str) -> float | None:
    """Return the mean of a metric in the last quarter of a run; None if it is not logged."""
    values = [value for _, value in history.values(name)]
    return fmean(values[-max(1, len(values) // 4) :]) if values else None
