"""Findings about the learning of the policy."""

from statistics import mean

from grpo.reporting.findings.base import MIN_STEPS, Finding, ends, often, rise, values
from grpo.rundir.run_dir import Run


def reward_flat(run: Run) -> Finding | None:
    """The reward has not risen by more than two standard errors over the second half of the run or longer.

    A flat reward is no finding where there is nothing to gain: at an accuracy of 90 %, or if rewards hardly differ.
    """
    rewards = values(run, "reward")
    accuracy, spread = ends(run, f"rewards/{run.grader}/mean"), ends(run, "reward_std")
    if len(rewards) < 2 * MIN_STEPS or (accuracy and mean(accuracy[1]) >= 0.9):
        return None
    if spread and mean(spread[1]) < 0.02 * abs(mean(value for _, value in rewards[-MIN_STEPS:])):
        return None
    for start in range(0, len(rewards) // 2 + 1, max(1, len(rewards) // 20)):
        tail = [value for _, value in rewards[start:]]
        gained, error = rise(tail[: len(tail) // 3], tail[-(len(tail) // 3) :])
        if gained <= 2 * error:
            break
    else:
        return None
    half = len(tail) // 2
    evidence = f"mean reward {mean(tail[:half]):.3g} in the first half of these {len(tail)} steps, "
    evidence += f"{mean(tail[half:]):.3g} in the second"
    if gained < -2 * error:
        return Finding(
            "reward_fell",
            f"The reward has fallen since step {rewards[start][0]}",
            evidence,
            f"lower train.learning_rate ({run.config.train.learning_rate:g}), set train.max_grad_norm, or add a "
            "penalty for leaving the reference, train.beta=0.01; train.resume_from_checkpoint=… continues from before "
            "the fall",
        )
    return Finding(
        "reward_flat",
        f"The reward has not risen since step {rewards[start][0]}",
        evidence,
        f"raise train.learning_rate, for example to {3 * run.config.train.learning_rate:g}{larger_groups(run)}; read "
        "the best and worst completions below: does the reward tell them apart?",
    )


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
