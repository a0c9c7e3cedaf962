"""Findings about the learning of the policy."""

import math
from statistics import mean

from grpo.reporting.findings.base import MIN_STEPS, Finding, ends, often, rise, values
from grpo.rundir.run_dir import Run
from grpo.utils.estimators import unpaired_difference_interval

NOTABLE = 0.25
"""Notable change of the reward, in its standard deviations: a run has to be long enough to show one."""


def accuracy_fell(run: Run) -> Finding | None:
    """The accuracy on held-out problems has fallen: the 95 % interval of its change is below 0.

    Where the reward has fallen, or has risen by three standard errors (`hacking`), another finding says so.
    """
    change, quarters = held_out_change(run), ends(run, "reward")
    gained, error = rise(*quarters) if quarters else (0.0, 0.0)
    if not change or change[1] >= 0 or reward_fell(run) or gained > 3 * error:
        return None
    before, after = run.evaluation["before"], run.evaluation["after"]
    return Finding(
        "accuracy_fell",
        "The held-out accuracy has fallen",
        f"{before['accuracy']:.1%} before, {after['accuracy']:.1%} after, of {after['samples']} problems",
        f"lower train.learning_rate ({run.config.train.learning_rate:g}): python -m grpo.preflight suggests one; read "
        "the completions with the highest reward below: do they deserve it?",
    )


def reward_fell(run: Run) -> Finding | None:
    """The reward has fallen by three standard errors, and notably, over the second half of the run or longer.

    A rise of the held-out accuracy says that it is no harm.
    """
    rewards, change, deviation = values(run, "reward"), held_out_change(run), deviation_of(run)
    if len(rewards) < 2 * MIN_STEPS or (change and change[0] > 0):
        return None
    for start in range(0, len(rewards) // 2 + 1, max(1, len(rewards) // 20)):
        tail = [value for _, value in rewards[start:]]
        gained, error = rise(tail[: len(tail) // 3], tail[-(len(tail) // 3) :])
        if gained < -max(3 * error, NOTABLE * deviation):
            half = len(tail) // 2
            return Finding(
                "reward_fell",
                f"The reward has fallen since step {rewards[start][0]}",
                f"mean reward {mean(tail[:half]):.3g} in the first half of these {len(tail)} steps, "
                f"{mean(tail[half:]):.3g} in the second",
                f"lower train.learning_rate ({run.config.train.learning_rate:g}), set train.max_grad_norm, or add a "
                "penalty for leaving the reference, train.beta=0.01; train.resume_from_checkpoint=… continues from "
                "before the fall",
            )
    return None


def reward_flat(run: Run) -> Finding | None:
    """Neither the held-out accuracy nor the reward has risen; or the run is too short to tell.

    A flat reward is no finding where there is nothing to gain: at an accuracy of 90 %, or if rewards hardly differ.
    """
    rewards, change = [value for _, value in values(run, "reward")], held_out_change(run)
    accuracy, deviation = ends(run, f"rewards/{run.grader}/mean"), deviation_of(run)
    if (change and change[0] > 0) or (accuracy and mean(accuracy[1]) >= 0.9) or reward_fell(run):
        return None
    third = len(rewards) // 3
    gained, error = rise(rewards[:third], rewards[-third:]) if len(rewards) >= MIN_STEPS else (0.0, math.inf)
    if 2 * error > NOTABLE * deviation:
        return too_few_steps(run, 2 * error) if gained <= 2 * error else None
    if gained > 2 * error or deviation < 0.02 * abs(mean(rewards[-third:])):
        return None
    return Finding(
        "reward_flat",
        "The reward has not risen",
        f"mean reward {mean(rewards[:third]):.3g} in the first third of {len(rewards)} steps, "
        f"{mean(rewards[-third:]):.3g} in the last; a rise of {2 * error:.2g} would have been seen",
        f"raise train.learning_rate ({run.config.train.learning_rate:g}): python -m grpo.preflight suggests one"
        f"{larger_groups(run)}; read the best and worst completions below: does the reward tell them apart?",
    )


def too_few_steps(run: Run, visible: float) -> Finding | None:
    """The run is over, and too short to tell whether the reward rises.

    Args:
        visible: the smallest rise that would have been seen.
    """
    if run.status != "completed":
        return None
    steps = len(values(run, "reward"))
    seen = f"only a rise of {visible:.2g} would have been seen" if math.isfinite(visible) else f"at least {MIN_STEPS}"
    return Finding(
        "too_few_steps",
        "Too few steps to tell whether the policy learns",
        f"{steps} logged steps; {seen}{' are needed' * (not math.isfinite(visible))}",
        "raise train.max_steps; more completions per step, or a larger task.eval.size, show smaller changes",
    )


def deviation_of(run: Run) -> float:
    """Return the standard deviation of the reward, a mean over the steps of the run."""
    deviations = [value for _, value in values(run, "reward_std")]
    return mean(deviations) if deviations else 0.0


def held_out_change(run: Run) -> tuple[float, float] | None:
    """Return the 95 % interval of the change in accuracy on held-out problems; None without two evaluations."""
    before, after = run.evaluation.get("before"), run.evaluation.get("after")
    if not (before and after):
        return None
    counts = [(round(part["accuracy"] * part["samples"]), part["samples"]) for part in (after, before)]
    return unpaired_difference_interval(*counts[0], *counts[1])


def larger_groups(run: Run) -> str:
    """Return the advice to enlarge groups, where many of them have zero variance."""
    equal = ends(run, "rollout/zero_variance")
    size = run.config.train.num_generations
    if not equal or mean(equal[1]) <= 0.3:
        return ""
    return f", or train.num_generations={2 * size} for fewer zero-variance groups"


def groups_equal(run: Run) -> Finding | None:
    """In 90 % of the groups all completions have the same reward, so that the gradient is zero."""
    equal = ends(run, "rollout/zero_variance")
    if not equal or mean(equal[1]) < 0.9:
        return None
    evidence = f"{mean(equal[1]):.0%} of the groups in the last quarter have zero variance"
    sampled = ends(run, f"rewards/{run.grader}/mean")
    accuracy = mean(sampled[1]) if sampled else None
    if accuracy is not None:
        evidence += f", {accuracy:.0%} of the completions are correct"
    if accuracy is not None and accuracy >= 0.8:
        return Finding(
            "too_easy",
            "The problems have become too easy",
            evidence,
            "take harder problems, generate until enough teach (rollout.dynamic_sampling=true), or stop earlier",
        )
    if sampled and max(map(mean, sampled)) <= 0.2:
        return Finding(
            "too_hard",
            "The problems are too hard",
            evidence,
            "too few groups hold a correct answer: take easier problems first, give an example in the prompt "
            "(task.few_shot), raise train.temperature or train.num_generations, or add a reward for partial success",
        )
    return Finding(
        "groups_equal",
        "Zero-variance groups",
        evidence,
        "if the completions of a group are alike, lower train.learning_rate or raise train.temperature; else each "
        "problem is always or never solved: take problems in between, or add a reward that tells completions apart",
    )


def cut_off(run: Run) -> Finding | None:
    """More than 10 % of the completions are truncated at `max_completion_length`."""
    clipped = often(run, "completions/clipped_ratio")
    if not clipped:
        return None
    return Finding(
        "cut_off",
        "Completions are truncated",
        f"{clipped[1]:.0%} of those in the last quarter reach train.max_completion_length="
        f"{run.config.train.max_completion_length}, after {clipped[0]:.0%} in the first",
        "raise train.max_completion_length if they are close to an answer; if they ramble, add +reward=overlong "
        "or set train.mask_truncated_completions=true",
    )


def entropy_collapsed(run: Run) -> Finding | None:
    """The entropy has fallen to a tenth of its first value before the accuracy has reached 90 %."""
    accuracy = ends(run, f"rewards/{run.grader}/mean")
    if accuracy and mean(accuracy[1]) >= 0.9:
        return None
    for name in ("entropy", "update/entropy"):
        entropy = ends(run, name, 0.1) if len(values(run, name)) >= 2 * MIN_STEPS else None
        if entropy and mean(entropy[1]) < 0.1 * mean(entropy[0]):
            return Finding(
                "entropy_collapsed",
                "The policy has stopped exploring",
                f"entropy {mean(entropy[0]):.3g} nats per token at the beginning, {mean(entropy[1]):.3g} at the end",
                "lower train.learning_rate, raise train.temperature or train.epsilon_high (train=dapo), or add a "
                "penalty for leaving the reference, train.beta=0.01",
            )
    return None


def kl_exploded(run: Run) -> Finding | None:
    """The KL divergence to the reference exceeds 1 nat per token: the texts are no longer those of the model."""
    kl = values(run, "kl")
    last = [value for _, value in kl[-max(1, len(kl) // 4) :]]
    if not kl or mean(last) <= 1:
        return None
    first = next((step for step, value in kl if value > 1), kl[-1][0])
    return Finding(
        "kl_exploded",
        "The policy has diverged from its reference",
        f"KL {mean(last):.3g} nats per token in the last quarter, above 1 since step {first}",
        f"lower train.learning_rate={run.config.train.learning_rate:g}, or raise train.beta={run.config.train.beta:g}",
    )
