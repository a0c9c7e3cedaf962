"""Findings about single tasks of a mixture."""

from statistics import mean

from grpo.reporting.findings.base import Finding, ends
from grpo.rundir.run_dir import Run


def task_equal(run: Run) -> Finding | None:
    """In 90 % of the groups of a task, but not of the whole run, all completions have the same reward."""
    everything = ends(run, "rollout/zero_variance")
    if not everything or mean(everything[1]) >= 0.9:
        return None
    shares = {name: ends(run, f"rollout/zero_variance/{name}") for name in run.tasks}
    equal = {name: mean(share[1]) for name, share in shares.items() if share and mean(share[1]) >= 0.9}
    if not equal:
        return None
    name = max(equal, key=lambda name: equal[name])
    return Finding(
        "task_equal",
        f"Nothing is learned from task {', '.join(equal)}",
        "zero-variance groups in the last quarter: " + ", ".join(f"{key} {share:.0%}" for key, share in equal.items()),
        f"lower task.tasks.{name}.weight={run.config.task.tasks[name].weight:g}, or take problems of it that are "
        "neither always nor never solved",
    )


def task_worse(run: Run) -> Finding | None:
    """The accuracy on the held-out problems of a task has fallen, 95 % intervals apart."""
    before, after = (run.evaluation.get(when, {}).get("by_task", {}) for when in ("before", "after"))
    fallen = [name for name in after if name in before and after[name]["interval"][1] < before[name]["interval"][0]]
    if not fallen:
        return None
    by_how_much = [
        f"{task} {before[task]['accuracy']:.1%} before, {after[task]['accuracy']:.1%} after" for task in fallen
    ]
    return Finding(
        "task_worse",
        f"Task {', '.join(fallen)} has become worse",
        ", ".join(by_how_much),
        f"raise task.tasks.{fallen[0]}.weight={run.config.task.tasks[fallen[0]].weight:g}, or add a penalty for "
        "leaving the reference, train.beta=0.01",
    )
