"""Machines that leave and come while a run runs, as with `launch.nodes=2:4`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo.launching.causes import FOR_OTHERS, SIGTERM_TO_SIGKILL, first_cause
from grpo.rundir.resume import checkpoints
from grpo.utils.patching import patched

IN_VAIN = 10
"""Restarts in a row, without a new checkpoint, that are not counted."""


@contextmanager
def machines_may_change(run_dir: Path, program: str) -> Iterator[None]:
    """While inside, torchelastic counts no restart because of other machines, and gives a step time for a checkpoint.

    Where a machine leaves, the processes of the others fail, too, which torchelastic takes for failures of theirs; or
    they wait for it. Where one comes, it gives the processes 30 seconds to end.

    Args:
        run_dir: whose checkpoints show that the run comes forward.
        program: what says that machines have changed.
    """
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    monitor = LocalElasticAgent._monitor_workers
    newest, in_vain = checkpoints(run_dir)[:1], 0

    def may_restart() -> bool:
        nonlocal newest, in_vain
        before, newest = newest, checkpoints(run_dir)[:1]
        in_vain = in_vain + 1 if newest == before else 0
        return in_vain <= IN_VAIN

    def watch(agent: Any, group: Any) -> Any:
        result = monitor(agent, group)
        lost = result.state == WorkerState.HEALTHY and has_lost_a_machine(group)
        ended_for_others = result.failures and first_cause(result.failures)[1].exitcode in FOR_OTHERS
        if lost or (ended_for_others and may_restart()):
            agent._remaining_restarts += 1
            tell()
        return RunResult(state=WorkerState.UNHEALTHY) if lost else result

    def stop(agent: Any, group: Any) -> None:
        has_come = group.state == WorkerState.HEALTHY
        if has_come:
            tell()
        agent._shutdown(timeout=agent._shutdown_timeout if has_come else SIGTERM_TO_SIGKILL)

    def tell() -> None:
        print(f"{program}: a machine has left or come; all continue from the newest checkpoint", file=sys.stderr)

    with (
        patched("torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers", watch),
        patched("torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._stop_workers", stop),
    ):
        yield


def has_lost_a_machine(group: Any) -> bool:
    """Return whether a machine has given no sign for 15 seconds, before the end of the run."""
    rendezvous = group.spec.rdzv_handler._state_holder.state
    return not rendezvous.closed and len(rendezvous.participants) < group.group_world_size
