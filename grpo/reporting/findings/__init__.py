"""What a run's metrics say, in words: rules, each with its evidence and what to do about it.

A rule is a function of a run that returns a finding or None. Its limits are written where it is.
"""

from collections.abc import Callable

from grpo.reporting.findings.base import Finding
from grpo.reporting.findings.learning import cut_off, entropy_collapsed, groups_equal, kl_exploded, reward_flat
from grpo.reporting.findings.machine import memory_near_limit, mismatch, steps_skipped
from grpo.reporting.findings.rewards import drowned, hacking, never_fired, reward_errors
from grpo.runs.run_dir import Run

__all__ = ["Finding", "findings"]
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


def findings(run: Run) -> list[Finding]:
    """Return what the rules find in a run, in their order; nothing for a healthy one."""
    return [found for rule in RULES if (found := rule(run))]
