"""Findings about updates that do not train as intended: learning rate, gradients, the loss, the penalty."""

import math
from statistics import StatisticsError, correlation, fmean, linear_regression, median

from grpo.extras.doctor.diagnosis import Diagnosis, listed
from grpo.extras.doctor.history import History

LEAST = 10
"""Logged steps that a rule about a trend needs."""


def learning_rate_zero(history: History) -> Diagnosis | None:
    """The learning rate is 0 in all steps, or in the last fifth of them and longer."""
    rates = history.values("learning_rate")
    trained = [place for place, (_, rate) in enumerate(rates) if rate]
    if len(rates) < 3:
        return None
    if not trained:
        return Diagnosis(
            "learning_rate_zero",
            "The learning rate is 0 in every step: nothing is trained",
            f"learning_rate 0 in all {len(rates)} logged steps",
            "set learning_rate (1e-6 for all weights, 1e-5 for LoRA are usual starts); with a scheduler, compare "
            "warmup_steps with the number of steps",
            "error",
        )
    idle = len(rates) - 1 - trained[-1]
    if idle < max(3, len(rates) / 5):
        return None
    step, rate = rates[trained[-1]]
    return Diagnosis(
        "learning_rate_ended",
        f"The learning rate is 0 since step {rates[trained[-1] + 1][0]}",
        f"{rate:.3g} in step {step}, then 0 in the last {idle} of {len(rates)} logged steps",
        "the scheduler has been made for fewer steps: compare its number of steps with max_steps or num_train_epochs, "
        "also after a resume with other values",
    )


def gradient_not_finite(history: History) -> Diagnosis | None:
    """A gradient norm or a loss is NaN or infinite."""
    for name in ("grad_norm", "loss"):
        logged = [(row["step"], row[name]) for row in history.steps if row.get(name) is not None]
        broken = [(step, value) for step, value in logged if not math.isfinite(value)]
        if broken:
            return Diagnosis(
                "gradient_not_finite",
                f"{name} is not finite",
                f"{len(broken)} of {len(logged)} logged steps; {listed(broken)}",
                "train in bfloat16 instead of float16, lower learning_rate or max_grad_norm, and look for a reward "
                "that is infinite or huge, or a completion that is empty; after such a step all weights may be NaN",
                "error",
            )
    return None


def gradient_zero(history: History) -> Diagnosis | None:
    """The gradient is 0 in half of the steps whose rewards differ within groups."""
    steps = [
        row
        for row in history.steps
        if row.get("grad_norm") is not None
        and (row.get("reward_std") or 0) > 1e-4
        and row.get("frac_reward_zero_std", 1.0) is not None
        and row.get("frac_reward_zero_std", 1.0) < 1
    ]
    zero = [(row["step"], row["reward_std"]) for row in steps if row["grad_norm"] == 0]
    if len(zero) < max(3, len(steps) / 2):
        return None
    return Diagnosis(
        "gradient_zero",
        "The gradient is 0 although rewards differ",
        f"grad_norm 0 in {len(zero)} of {len(steps)} steps with non-zero variance; reward_std in {listed(zero)}",
        "no parameter gets a gradient: check that the adapter is trainable, enable_input_require_grads with gradient "
        "checkpointing, mask_truncated_completions where all completions are truncated, and the versions of DeepSpeed "
        "and of the trainer",
        "error",
    )


def gradient_exploded(history: History) -> Diagnosis | None:
    """The median gradient norm of the last quarter is above 10, and 30 times that of the first half."""
    norms = [value for _, value in history.values("grad_norm")]
    if len(norms) < LEAST:
        return None
    before, after = median(norms[: len(norms) // 2]), median(norms[-(len(norms) // 4) :])
    if after < max(10.0, 30 * before):
        return None
    return Diagnosis(
        "gradient_exploded",
        "The gradient has exploded",
        f"median grad_norm {before:.3g} in the first half of the run, {after:.3g} in the last quarter",
        "lower learning_rate and max_grad_norm, and continue from a checkpoint before the rise",
    )


def kl_dominates(history: History) -> Diagnosis | None:
    """The coefficient of the penalty for leaving the reference is 1 or more."""
    beta, evidence = beta_of(history)
    if beta < 1:
        return None
    return Diagnosis(
        "kl_dominates",
        f"The KL penalty outweighs the reward: beta is about {beta:.2g}",
        evidence,
        "lower beta: 0 to 0.04 is usual; from 1 on the policy is held at its reference, whatever the reward",
    )


def beta_of(history: History) -> tuple[float, str]:
    """Return the coefficient of the KL divergence and its evidence; 0 if it is not known.

    It is logged (verl), or the slope of the loss over the KL divergence, if their correlation is 0.9 or more: without
    the penalty the loss is rounding.
    """
    if logged := history.values("beta"):
        return logged[-1][1], f"actor/kl_coef {logged[-1][1]:g}"
    losses = dict(history.values("loss"))
    pairs = [(kl, losses[step]) for step, kl in history.values("kl") if step in losses]
    if len(pairs) < LEAST:
        return 0.0, ""
    kl, loss = zip(*pairs, strict=True)
    try:
        together, (slope, _) = correlation(kl, loss), linear_regression(kl, loss)
    except StatisticsError:  # one of them is constant
        return 0.0, ""
    evidence = f"loss = {slope:.3g} x kl in {len(pairs)} steps, correlation {together:.4f}"
    return slope if together >= 0.9 else 0.0, f"{evidence}; mean KL {fmean(kl):.3g} nats per token"


def loss_zero(history: History) -> Diagnosis | None:
    """The loss is 0 but for rounding, while gradients are not: normal, and often asked."""
    losses, norms = history.values("loss"), history.values("grad_norm")
    if len(losses) < 3 or not any(value for _, value in norms) or max(abs(value) for _, value in losses) > 1e-3:
        return None
    return Diagnosis(
        "loss_zero",
        "The loss is about 0, which is normal",
        f"|loss| at most {max(abs(value) for _, value in losses):.2g}, grad_norm {fmean(v for _, v in norms):.3g} on "
        "average",
        "nothing to do: with one update per rollout every importance ratio is 1, and the advantages of a group add up "
        "to 0, so that the loss is 0 and its gradient is not; read reward, not loss",
        "info",
    )
