"""Findings about a run: rules over its metrics, each with evidence and advice.

A rule is a function from a run to a finding or None. Its thresholds are in its code.
"""

from collections.abc import Callable

from grpo.reporting.findings.base import Finding
from grpo.reporting.findings.engine import engine_differs, mismatch, sequences_masked
from grpo.reporting.findings.learning import cut_off, entropy_collapsed, groups_equal, kl_exploded, reward_flat
from grpo.reporting.findings.machine import fragments, gpu_idle, host_memory_grows, memory_near_limit, steps_skipped
from grpo.reporting.findings.rewards import drowned, hacking, never_fired, reward_errors
from grpo.reporting.findings.tools import never_called, never_equal, tools_fail, turns_used_up
from grpo.rundir.run_dir import Run

__all__ = ["Finding", "findings"]
RULES: tuple[Callable[[Run], Finding | None], ...] = (
    engine_differs,
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
    never_called,
    tools_fail,
    turns_used_up,
    never_equal,
    mismatch,
    sequences_masked,
    memory_near_limit,
    host_memory_grows,
    fragments,
    gpu_idle,
)


def findings(run: Run) -> list[Finding]:
    """Return the findings about a run in the order of the rules; none for a healthy one."""
    return [found for rule in RULES if (found := rule(run))]
