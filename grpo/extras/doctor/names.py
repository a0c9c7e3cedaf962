"""TRL's names for the metrics of other trainers."""

from typing import Any

from grpo.extras.doctor.history import Row, number

FIRST_OF: dict[str, tuple[str, ...]] = {
    "reward": ("critic/rewards/mean",),
    "rewards/score/mean": ("critic/score/mean",),
    "completions/mean_length": ("response_length/mean",),
    "completions/max_length": ("response_length/max",),
    "completions/clipped_ratio": ("response_length/clip_ratio",),
    "entropy": ("actor/entropy", "actor/entropy_loss", "entropy/mean"),
    "kl": ("actor/kl_loss",),
    "beta": ("actor/kl_coef",),
    "loss": ("actor/loss", "actor/pg_loss"),
    "grad_norm": ("actor/grad_norm",),
    "learning_rate": ("actor/lr",),
    "clip_ratio/region_mean": ("actor/pg_clipfrac",),
    "sampling/importance_sampling_ratio/mean": ("rollout_corr/rollout_is_mean",),
}
"""Names of verl and ms-swift by TRL's; the first that is logged counts."""
AS_THEY_ARE = (
    *("reward", "reward_std", "frac_reward_zero_std", "loss", "grad_norm", "learning_rate", "kl", "entropy"),
    *("completions/", "rewards/", "sampling/", "clip_ratio/", "rollout_corr/", "rollout/", "update/", "tools/"),
    *("training/rollout_probs_diff_mean", "engine/"),
)
"""Names, and beginnings of names, that are TRL's, ours or of verl alone."""
OF_GRPO = ("reward", "reward_std", "frac_reward_zero_std", "kl", "completions/", "rewards/")
"""Names without which a log is of something else."""


def named(logged: dict[str, Any]) -> Row:
    """Return the metrics of a step under TRL's names; what no rule reads is omitted.

    verl logs the extremes of rewards and advantages: where they are equal, the standard deviation is 0, or all groups
    are zero-variance.
    """
    plain = {
        name.removeprefix("train/").replace("rollout_correction/", "rollout_corr/"): value
        for name, value in logged.items()
    }
    row: Row = {name: number(value) for name, value in plain.items() if name.startswith(AS_THEY_ARE)}
    for name, others in FIRST_OF.items():
        present = next((other for other in others if other in plain), None)
        if name not in row and present:
            row[name] = number(plain[present])
    for name, extremes, value in (("reward_std", "rewards", 0.0), ("frac_reward_zero_std", "advantages", 1.0)):
        low, high = (number(plain.get(f"critic/{extremes}/{end}")) for end in ("min", "max"))
        if name not in row and low is not None and low == high:
            row[name] = value
    return row


def is_of_grpo(rows: list[Row]) -> bool:
    """Return whether any metric is one of GRPO's."""
    return any(name.startswith(OF_GRPO) for row in rows for name in row)
