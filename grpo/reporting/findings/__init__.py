"""Findings about a run: rules over its metrics, each with evidence and advice.

A rule is a function from a run to a finding or None. Its thresholds are in its code.
"""

from collections.abc import Callable

from grpo.reporting.findings import guard, learning, machine, rewards, tasks
from grpo.reporting.findings.base import Finding
from grpo.rundir.run_dir import Run

__all__ = ["Finding", "findings"]
RULES: tuple[Callable[[Run], Finding | None], ...] = (
    machine.engine_differs,
    machine.steps_skipped,
    guard.guard_acted,
    rewards.reward_errors,
    rewards.never_fired,
    rewards.hacking,
    learning.kl_exploded,
    learning.entropy_collapsed,
    learning.groups_equal,
    learning.cut_off,
    learning.accuracy_fell,
    learning.reward_fell,
    learning.reward_flat,
    tasks.task_equal,
    tasks.task_worse,
    rewards.drowned,
    rewards.never_called,
    rewards.tools_fail,
    rewards.turns_used_up,
    rewards.never_equal,
    machine.mismatch,
    machine.sequences_masked,
    machine.memory_near_limit,
    machine.host_memory_grows,
    machine.fragments,
    machine.gpu_idle,
)


def findings(run: Run) -> list[Finding]:
    """Return the findings about a run in the order of the rules; none for a healthy one."""
    return [finding for rule in RULES if (finding := rule(run))]
