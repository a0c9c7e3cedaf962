"""What a run's metrics say, in words: rules, each with its evidence and what to do about it.

A rule looks at means over windows of steps, as single steps are noise. Its limits are written where it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from omegaconf import DictConfig

from grpo.record import Run

FEWEST = 10
"""Steps that a rule about a trend needs at least."""
MISMATCH = 0.1
"""Nats a token: half precision and other kernels alone make 0.01 to 0.05."""

ADVICE = (
    "lower learning_rate, max_grad_norm or adam_beta2, or look at the data: a reward that is infinite or huge, "
    "a completion that is empty or endless"
)
"""Against gradients that are not finite."""


@dataclass(frozen=True)
class Finding:
    """Something that a reader of a run should know."""

    name: str
    title: str
    evidence: str
    advice: str


def findings(run: Run) -> list[Finding]:
    """Return what the rules find in a run, in their order; nothing for a healthy one."""
    return [found for rule in RULES if (found := rule(run))]


def values(run: Run, name: str) -> list[tuple[int, float]]:
    """Return steps and values of a metric, where it was logged."""
    return [(row["step"], row[name]) for row in run.metrics if row.get(name) is not None]


def ends(run: Run, name: str, share: float = 0.25) -> tuple[list[float], list[float]] | None:
    """Return the values of a metric in the first and the last part of a run; None if there are too few."""
    found = [value for _, value in values(run, name)]
    size = int(share * len(found))
    return (found[:size], found[-size:]) if len(found) >= FEWEST and size >= 2 else None


def rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return by how much the mean has risen from one sample to another, and the standard error of that."""
    error = (stdev(before) ** 2 / len(before) + stdev(after) ** 2 / len(after)) ** 0.5
    return mean(after) - mean(before), error


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
            f"lower train.learning_rate={run.config.train.learning_rate:g}, set train.max_grad_norm, or add a penalty for "
            "leaving the reference, train.beta=0.01; train.resume_from_checkpoint=… goes on from before the fall",
        )
    return Finding(
        "reward_flat",
        f"The reward has not risen since step {rewards[start][0]}",
        evidence,
        f"raise train.learning_rate={run.config.train.learning_rate:g}, or train.num_generations="
        f"{run.config.train.num_generations} for more groups that differ; look at the best and worst completions below: "
        "does the reward tell them apart?",
    )


def groups_equal(run: Run) -> Finding | None:
    """In nine of ten groups all completions have the same reward: they teach nothing. Right ones and wrong ones differ."""
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
        "raise train.max_completion_length if they are on their way to an answer; if they ramble, add reward=overlong or "
        "set train.mask_truncated_completions=true",
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
                "lower train.learning_rate, raise train.temperature or train.epsilon_high (train=dapo), or add a penalty "
                "for leaving the reference, train.beta=0.01",
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


def hacking(run: Run) -> Finding | None:
    """The reward has risen by more than three standard errors, and the accuracy on held-out problems not even by two."""
    rewards = ends(run, "reward")
    before, after = run.evaluation.get("before"), run.evaluation.get("after")
    if not (rewards and before and after):
        return None
    gained, error = rise(*rewards)
    better = after["accuracy"] - before["accuracy"]
    variance = sum(part["accuracy"] * (1 - part["accuracy"]) / part["samples"] for part in (before, after))
    if (
        gained <= 3 * error
        or gained < 0.05 * abs(mean(rewards[1]))
        or better > 2 * variance**0.5
        or after["accuracy"] > 0.9
    ):
        return None
    parts = {}
    for name, reward in run.config.reward.items():
        part = ends(run, f"rewards/{name}/mean")
        if part and name != run.judge:
            parts[name] = reward.get("weight", 1.0) * rise(*part)[0]
    most = max(parts, key=lambda name: parts[name]) if parts else None
    blame = f", most of it from reward.{most} ({parts[most]:+.2f})" if most else ""
    return Finding(
        "hacking",
        "The reward rises and the answers do not get better",
        f"reward {mean(rewards[0]):.3g} in the first quarter, {mean(rewards[1]):.3g} in the last{blame}; held-out accuracy "
        f"{before['accuracy']:.1%} before, {after['accuracy']:.1%} after",
        "read the completions with the highest reward below: they show what is being rewarded instead; "
        + (f"lower reward.{most}.weight, or bound it" if most else "mend the reward, and try it with rewards.check"),
    )


def drowned(run: Run) -> Finding | None:
    """A reward's differences are less than a tenth of another's: the advantage hardly sees it."""
    if run.config.train.get("multi_objective_aggregation") == "normalize_then_sum":
        return None
    weights = {str(name): reward.get("weight", 1.0) for name, reward in run.config.reward.items()}
    spreads = {name: [value for _, value in values(run, f"rewards/{name}/std")] for name in weights}
    spread = {name: abs(weights[name]) * mean(found) for name, found in spreads.items() if found and weights[name]}
    loudest = max(spread, key=lambda name: spread[name], default=None)
    quiet = [name for name in spread if loudest and 0 < spread[name] < 0.1 * spread[loudest]]
    if not quiet or not loudest:
        return None
    return Finding(
        "drowned",
        f"reward.{loudest} drowns reward.{', reward.'.join(quiet)}",
        "weight times standard deviation: "
        + ", ".join(f"{name} {spread[name]:.3g}" for name in sorted(spread, key=lambda name: -spread[name])),
        f"raise reward.{quiet[0]}.weight or lower reward.{loudest}.weight={weights[loudest]:g}; or "
        "train.multi_objective_aggregation=normalize_then_sum brings all to one scale first",
    )


def never_fired(run: Run) -> Finding | None:
    """A reward function has given 0 for every completion of the run."""
    silent = []
    for name in run.config.reward:
        given = values(run, f"rewards/{name}/mean")
        if len(given) >= FEWEST and not any(value for _, value in given + values(run, f"rewards/{name}/std")):
            silent.append(f"reward.{name}")
    if not silent:
        return None
    return Finding(
        "never_fired",
        f"{', '.join(silent)} gave 0 to every completion",
        f"in all of {len(run.metrics)} logged steps",
        "try it on completions below: python -m rewards.check says what it makes of a text; the task may ask for a form "
        "that the policy never writes",
    )


def reward_errors(run: Run) -> Finding | None:
    """A reward function raised or gave no number, so that rows were left out."""
    errors: dict[str, dict[str, int]] = run.summary.get("reward_errors") or {}
    if not errors:
        return None
    told = [f"reward.{name}: {count} {kind}" for name, kinds in errors.items() for kind, count in kinds.items()]
    return Finding(
        "reward_errors",
        "Completions were left out, as a reward function failed on them",
        "; ".join(told),
        "the rows and the reasons are in reward_errors.jsonl; python -m rewards.check tries a function beforehand",
    )


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
        f"{len(over)} of {len(differences)} steps differ by more than {MISMATCH} nats a token, by {over[0][1]:.2f} at step "
        f"{over[0][0]}",
        f"likely causes: {'; '.join(mismatch_causes(run.config.train))}",
    )


def mismatch_causes(train: DictConfig) -> list[str]:
    """Return what such a difference can come from, the likeliest first."""
    filters = {"top_p": train.top_p < 1, "top_k": bool(train.top_k), "min_p": bool(train.min_p)}
    filters["repetition_penalty"] = train.repetition_penalty != 1
    found = [
        f"train.{name}={train[name]}, which the policy's log-probabilities do not have"
        for name, is_set in filters.items()
        if is_set
    ]
    if train.vllm_mode == "server":
        found.append("a server with another model, precision or --logprobs-mode: launch/vllm_server.sh")
    found.append("weights in half precision (model.dtype, train.bf16), most of all with a mixture of experts")
    return [*found, "a vLLM version that TRL does not know: `make vllm` installs the one that is tested"]


def memory_near_limit(run: Run) -> Finding | None:
    """Memory ran out in an update, which was done again in smaller parts, or more than nine tenths of it were used."""
    retries = sum(value for _, value in values(run, "update/oom_retries"))
    told = [f"{retries:.0f} updates ran out of memory and were done again in smaller parts"] if retries else []
    limits: dict[str, Any] = {"memory/host_gb": run.plan.get("host_capacity_gb")}
    if "memory/peak_reserved_gb" in run.summary:
        limits["memory/peak_reserved_gb"] = run.plan.get("capacity_gb")
    for name, limit in limits.items():
        used = run.summary.get(name)
        if limit and used and used > 0.9 * limit:
            told.append(f"{used:.1f} GB of {limit:.1f} GB of {'host' if 'host' in name else 'GPU'} memory used")
    if "host memory" in run.reason:
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


RULES: tuple[Callable[[Run], Finding | None], ...] = (
    steps_skipped,
    reward_errors,
    never_fired,
    hacking,
    kl_exploded,
    entropy_collapsed,
    groups_equal,
    cut_off,
    reward_flat,
    drowned,
    mismatch,
    memory_near_limit,
)
