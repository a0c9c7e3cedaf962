"""Findings about what the policy learns."""

from statistics import mean

from grpo.reporting.findings.base import FEWEST, Finding, ends, rise, values
from grpo.runs.run_dir import Run


def reward_flat(run: Run) -> Finding | None:
    """The reward has not risen, by more than two standard errors, in the second half of the run or longer.

    It may rest where there is nothing more to gain: at nine right answers of ten, or where rewards hardly differ.
    """
    rewards = values(run, "reward")
    right, spread = ends(run, f"rewards/{run.judge}/mean"), ends(run, "reward_std")
    if len(rewards) < 2 * FEWEST or (right and mean(right[1]) >= 0.9):
        return None
    if spread and mean(spread[1]) < 0.02 * abs(mean(value for _, value in rewards[-FEWEST:])):
        return None
    for start in range(0, len(rewards) // 2 + 1, max(1, len(rewards) // 20)):
        tail = [value for _, value in rewards[start:]]
        gained, error = rise(tail[: len(tail) // 3], tail[-(len(tail) // 3) :])
        if gained <= 2 * error:
            break
    else:
        return None
    half = len(tail) // 2
    evidence = (
        f"mean reward {mean(tail[:half]):.3g} in the first half of these {len(tail)} steps, {mean(tail[half:]):.3g}"
    )
    evidence += " in the second"
    if gained < -2 * error:
        return Finding(
            "reward_fell",
            f"The reward has fallen since step {rewards[start][0]}",
            evidence,
            f"lower train.learning_rate={run.config.train.learning_rate:g}, set train.max_grad_norm, or add a penalty "
            "for leaving the reference, train.beta=0.01; train.resume_from_checkpoint=… goes on from before the fall",
        )
    return Finding(
        "reward_flat",
        f"The reward has not risen since step {rewards[start][0]}",
        evidence,
        f"raise train.learning_rate={run.config.train.learning_rate:g}, or train.num_generations="
        f"{run.config.train.num_generations} for more groups that differ; look at the best and worst completions "
        "below: does the reward tell them apart?",
    )


def groups_equal(run: Run) -> Finding | None:
    """In nine of ten groups all completions have the same reward: they teach nothing."""
    equal = ends(run, "frac_reward_zero_std")
    if not equal or mean(equal[1]) < 0.9:
        return None
    evidence = f"{mean(equal[1]):.0%} of the groups in the last quarter have no difference in reward"
    right = ends(run, f"rewards/{run.judge}/mean")
    share = mean(right[1]) if right else None
    if share is not None:
        evidence += f", {share:.0%} of the completions are right"
    if share is not None and share >= 0.8:
        return Finding(
            "too_easy",
            "The problems have become too easy",
            evidence,
            "there is little left to learn from them: take harder problems, or stop earlier",
        )
    if right and max(map(mean, right)) <= 0.2:
        return Finding(
            "too_hard",
            "The problems are too hard",
            evidence,
            "no completion shows what would be right: take easier problems first, give an example in the prompt "
            "(task.few_shot), raise train.temperature or train.num_generations, or add a reward for part of the way",
        )
    return Finding(
        "groups_equal",
        "Groups have no difference in reward",
        evidence,
        "where the completions themselves are alike, lower train.learning_rate or raise train.temperature; else each "
        "problem is always or never solved: choose problems between, or add a reward that tells the completions apart",
    )


def cut_off(run: Run) -> Finding | None:
    """More than a tenth of the completions have reached `max_completion_length` without an end."""
    clipped = ends(run, "completions/clipped_ratio")
    if not clipped or mean(clipped[1]) <= 0.1:
        return None
    return Finding(
        "cut_off",
        "Completions are cut off",
        f"{mean(clipped[1]):.0%} of those in the last quarter reach train.max_completion_length="
        f"{run.config.train.max_completion_length}, after {mean(clipped[0]):.0%} in the first",
        "raise train.max_completion_length if they are on their way to an answer; if they ramble, add +reward=overlong "
        "or set train.mask_truncated_completions=true",
    )


def entropy_collapsed(run: Run) -> Finding | None:
    """The entropy has fallen to a tenth of what it was, before nine of ten answers were right."""
    right = ends(run, f"rewards/{run.judge}/mean")
    if right and mean(right[1]) >= 0.9:
        return None
    for name in ("entropy", "update/entropy"):
        found = ends(run, name, 0.1) if len(values(run, name)) >= 2 * FEWEST else None
        if found and mean(found[1]) < 0.1 * mean(found[0]):
            return Finding(
                "entropy_collapsed",
                "The policy has stopped exploring",
                f"entropy {mean(found[0]):.3g} nats a token at the beginning, {mean(found[1]):.3g} at the end",
                "lower train.learning_rate, raise train.temperature or train.epsilon_high (train=dapo), or add a "
                "penalty for leaving the reference, train.beta=0.01",
            )
    return None


def kl_exploded(run: Run) -> Finding | None:
    """The policy is a nat a token and more away from its reference: its texts are no longer those of the model."""
    kl = values(run, "kl")
    last = [value for _, value in kl[-max(1, len(kl) // 4) :]]
    if not kl or mean(last) <= 1:
        return None
    first = next((step for step, value in kl if value > 1), kl[-1][0])
    return Finding(
        "kl_exploded",
        "The policy has run away from its reference",
        f"KL {mean(last):.3g} nats a token in the last quarter, above 1 since step {first}",
        f"lower train.learning_rate={run.config.train.learning_rate:g}, or raise train.beta={run.config.train.beta:g}",
    )
