"""Findings about what a task is made of: reward functions, tools and environments, and groups with equal rewards."""

from statistics import mean

from grpo.reporting.findings.base import MIN_STEPS, Finding, ends, often, rise, tools_of, values
from grpo.rundir.run_dir import Run

PENALTIES = ("rewards.overlong.overlong", "rewards.repetition.repetition")
"""Built-in rewards whose best value is 0."""


def hacking(run: Run) -> Finding | None:
    """The reward has risen by more than three standard errors, and the held-out accuracy by less than one.

    The accuracy of the sampled completions has not risen by two standard errors either.
    """
    rewards = ends(run, "reward")
    before, after = run.evaluation.get("before"), run.evaluation.get("after")
    if not (rewards and before and after):
        return None
    gained, error = rise(*rewards)
    improvement = after["accuracy"] - before["accuracy"]
    variance = sum(part["accuracy"] * (1 - part["accuracy"]) / part["samples"] for part in (before, after))
    if gained <= 3 * error or gained < 0.05 * abs(mean(rewards[1])):
        return None
    sampled = ends(run, f"rewards/{run.grader}/mean")
    if sampled:
        learned, error = rise(*sampled)
        if learned > 2 * error:
            return None
    if improvement > variance**0.5 or after["accuracy"] > 0.9:
        return None
    gains = {}
    for name, reward in run.config.reward.items():
        level = ends(run, f"rewards/{name}/mean")
        if level and name != run.grader:
            gains[name] = reward.get("weight", 1.0) * rise(*level)[0]
    cause = next((name for name, gain in gains.items() if gain > gained / 2), None)
    blame = f", most of it from reward.{cause} ({gains[cause]:+.2f})" if cause else ""
    return Finding(
        "hacking",
        "The reward rises and the accuracy does not",
        f"reward {mean(rewards[0]):.3g} in the first quarter, {mean(rewards[1]):.3g} in the last{blame}; held-out "
        f"accuracy {before['accuracy']:.1%} before, {after['accuracy']:.1%} after",
        "read the completions with the highest reward below: they show what the reward pays for; "
        + (f"lower reward.{cause}.weight, or bound it" if cause else "fix the reward, and try it with rewards.check"),
    )


def drowned(run: Run) -> Finding | None:
    """A reward varies at first less than a tenth as much as another, so that it hardly affects the advantage.

    A reward that nearly all completions earn in full is no finding.
    """
    if run.config.train.get("multi_objective_aggregation") == "normalize_then_sum":
        return None
    weights = {str(name): reward.get("weight", 1.0) for name, reward in run.config.reward.items()}
    spread, level = {}, {}
    for name, weight in weights.items():
        deviations, means = ends(run, f"rewards/{name}/std"), ends(run, f"rewards/{name}/mean")
        if weight and deviations and means:
            spread[name], level[name] = abs(weight) * mean(deviations[0]), abs(weight * mean(means[0]))
    loudest = max(spread, key=lambda name: spread[name], default=None)
    quiet = [name for name in spread if loudest and 0.05 * level[name] < spread[name] < 0.1 * spread[loudest]]
    if not quiet or not loudest:
        return None
    return Finding(
        "drowned",
        f"reward.{loudest} dominates reward.{', reward.'.join(quiet)}",
        "weight times standard deviation: "
        + ", ".join(f"{name} {spread[name]:.3g}" for name in sorted(spread, key=lambda name: -spread[name])),
        f"raise reward.{quiet[0]}.weight or lower reward.{loudest}.weight={weights[loudest]:g}; or "
        "train.multi_objective_aggregation=normalize_then_sum brings all to one scale first",
    )


def never_fired(run: Run) -> Finding | None:
    """A reward function that is not a penalty gave 0, or no number, to every completion of the run."""
    never = []
    for name, reward in run.config.reward.items():
        means, logged = values(run, f"rewards/{name}/mean"), sum(f"rewards/{name}/mean" in row for row in run.metrics)
        if (
            (len(means) or logged) >= MIN_STEPS
            and reward.fn not in PENALTIES
            and not any(value for _, value in means + values(run, f"rewards/{name}/std"))
        ):
            never.append(f"reward.{name}")
    if not never:
        return None
    return Finding(
        "never_fired",
        f"{', '.join(never)} gave 0, or None, to every completion",
        f"in all of {len(run.metrics)} logged steps",
        "try it on the completions below with python -m rewards.check --run; the task may ask for a format that the "
        "policy never writes",
    )


def reward_errors(run: Run) -> Finding | None:
    """Completions were skipped because a reward function raised an exception or gave no number."""
    errors: dict[str, dict[str, int]] = run.summary.get("reward_errors") or {}
    counts = [f"reward.{name}: {count} {kind}" for name, kinds in errors.items() for kind, count in kinds.items()]
    if not counts:  # the run is not over, or was killed
        logged = {name: sum(value for _, value in values(run, f"rewards/{name}/errors")) for name in run.config.reward}
        counts = [f"reward.{name}: {count:.0f} in the logged steps" for name, count in logged.items() if count]
    if not counts:
        return None
    return Finding(
        "reward_errors",
        "Completions were skipped because a reward function failed on them",
        "; ".join(counts),
        "the completions and the reasons are in reward_errors.jsonl; test a function with python -m rewards.check",
    )


def never_called(run: Run) -> Finding | None:
    """A tool was not called in the last quarter of the run."""
    idle = [tool for tool in tools_of(run) if (calls := ends(run, f"tools/{tool}/calls")) and not any(calls[1])]
    if not idle:
        return None
    ever = [tool for tool in idle if any(value for _, value in values(run, f"tools/{tool}/calls"))]
    return Finding(
        "never_called",
        f"The policy does not call {', '.join(idle)}",
        f"no call in the last quarter of the run; {', '.join(ever) or 'none of them'} was called before",
        "a policy learns only from calls that it makes: say in task.system_prompt or an example (task.few_shot) when "
        "to call it, raise train.temperature, or begin with a model that was trained to call tools",
    )


def tools_fail(run: Run) -> Finding | None:
    """More than 10 % of the calls in the last quarter failed."""
    failed = often(run, "tools/failure_frequency")
    if not failed:
        return None
    return Finding(
        "tools_fail",
        "Tool calls fail",
        f"{failed[1]:.0%} of the calls in the last quarter, after {failed[0]:.0%} in the first",
        "read a conversation below, and the first error of each tool in train.log: wrong arguments want a clearer "
        "docstring, errors of the tool itself show up in grpo.tools.check, and hanging ones want task.tool_timeout",
    )


def turns_used_up(run: Run) -> Finding | None:
    """More than 10 % of the completions in the last quarter end with a call, or with its result."""
    unanswered = often(run, "tools/unanswered")
    if not unanswered:
        return None
    turns = run.config.train.max_tool_calling_iterations
    return Finding(
        "turns_used_up",
        "Completions end without an answer after tool calls",
        f"{unanswered[1]:.0%} of those in the last quarter",
        f"raise train.max_tool_calling_iterations={turns} or train.max_completion_length="
        f"{run.config.train.max_completion_length}, which counts results too; or return shorter results",
    )


def never_equal(run: Run) -> Finding | None:
    """With dynamic sampling, no group of the whole run had equal rewards."""
    shares = [value for _, value in values(run, "rollout/informative_share")]
    if not run.config.rollout.dynamic_sampling or len(shares) < 20 or min(shares) < 1:
        return None
    return Finding(
        "never_equal",
        "Dynamic sampling has nothing to replace",
        f"in {len(shares)} steps no group had equal rewards",
        "a reward that is never equal makes every group count, also those that teach nothing about correctness: "
        "round it, or set rollout.dynamic_sampling=false",
    )
