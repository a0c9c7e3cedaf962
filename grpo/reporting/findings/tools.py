"""Findings about tools and environments, and about dynamic sampling."""

from statistics import mean

from grpo.reporting.findings.base import Finding, ends, values
from grpo.rundir.run_dir import Run


def never_called(run: Run) -> Finding | None:
    """A tool was not called in the last quarter of the run."""
    tools = sorted({key.split("/")[1] for row in run.metrics for key in row if key.endswith("/calls")})
    idle = [tool for tool in tools if (calls := ends(run, f"tools/{tool}/calls")) and not any(calls[1])]
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
    failed = ends(run, "tools/failure_frequency")
    if not failed or mean(failed[1]) <= 0.1:
        return None
    return Finding(
        "tools_fail",
        "Tool calls fail",
        f"{mean(failed[1]):.0%} of the calls in the last quarter, after {mean(failed[0]):.0%} in the first",
        "read a conversation below, and the first error of each tool in train.log: wrong arguments want a clearer "
        "docstring, errors of the tool itself show up in grpo.tools.check, and hanging ones want task.tool_timeout",
    )


def turns_used_up(run: Run) -> Finding | None:
    """More than 10 % of the completions in the last quarter end with a call, or with its result."""
    unanswered = ends(run, "tools/unanswered")
    if not unanswered or mean(unanswered[1]) <= 0.1:
        return None
    turns = run.config.train.max_tool_calling_iterations
    return Finding(
        "turns_used_up",
        "Completions end without an answer after tool calls",
        f"{mean(unanswered[1]):.0%} of those in the last quarter",
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
