"""What torchelastic counts as a restart where the number of machines may change."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from grpo.launching import membership
from grpo.launching.membership import IN_VAIN, machines_may_change
from grpo.utils.distributed import LOST_STATUS
from grpo.utils.patching import replaced


def failed(*codes: int) -> RunResult:
    """What torchelastic finds where processes have ended."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="") for rank, code in enumerate(codes)
    }
    return RunResult(state=WorkerState.FAILED, failures=failures)


def meeting(machines: int, closed: bool = False) -> SimpleNamespace:
    """Where so many machines have met."""
    state = SimpleNamespace(participants=dict.fromkeys(range(machines), 0), closed=closed)
    return SimpleNamespace(_state_holder=SimpleNamespace(state=state))


def restarts_left(run_dir: Path, *found: RunResult) -> int:
    """Restarts that an agent without any has left before it looks whether one is left, after each of these."""
    agent, results = SimpleNamespace(_remaining_restarts=0), iter(found)
    group = SimpleNamespace(group_world_size=2, spec=SimpleNamespace(rdzv_handler=meeting(2)))
    stand_in = replaced(LocalElasticAgent, "_monitor_workers", lambda *_: next(results))
    with stand_in, machines_may_change(run_dir, "grpo.train"):
        for _ in found:
            LocalElasticAgent._monitor_workers(agent, group)
    return agent._remaining_restarts


@pytest.mark.parametrize(
    ("codes", "given"),
    [
        ([LOST_STATUS], 1),
        ([LOST_STATUS, -signal.SIGTERM], 1),
        ([130, 130], 1),
        ([-signal.SIGTERM], 1),
        ([1], 0),
        ([2], 0),
        ([LOST_STATUS, 1], 0),
        ([LOST_STATUS, -signal.SIGKILL], 0),
    ],
)
def test_only_an_end_because_of_others_gives_a_restart(tmp_path: Path, codes: list[int], given: int) -> None:
    assert restarts_left(tmp_path, failed(*codes)) == given


def test_no_restart_is_given_for_ever_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert restarts_left(tmp_path, *[failed(LOST_STATUS)] * (IN_VAIN + 5)) == IN_VAIN
    newest = iter(range(100))
    monkeypatch.setattr(membership, "checkpoints", lambda _: [tmp_path / f"checkpoint-{next(newest)}"])
    assert restarts_left(tmp_path, *[failed(LOST_STATUS)] * (IN_VAIN + 5)) == IN_VAIN + 5


def test_processes_that_run_are_left_alone(tmp_path: Path) -> None:
    assert restarts_left(tmp_path, RunResult(state=WorkerState.HEALTHY)) == 0


@pytest.mark.parametrize(
    ("machines", "closed", "state"),
    [
        (2, False, WorkerState.UNHEALTHY),
        (3, False, WorkerState.HEALTHY),
        (2, True, WorkerState.HEALTHY),  # the run has ended, and this machine is not yet done
    ],
)
def test_processes_that_wait_for_a_lost_machine_restart(
    tmp_path: Path, machines: int, closed: bool, state: WorkerState
) -> None:
    healthy = replaced(LocalElasticAgent, "_monitor_workers", lambda *_: RunResult(state=WorkerState.HEALTHY))
    agent = SimpleNamespace(_remaining_restarts=0)
    group = SimpleNamespace(group_world_size=3, spec=SimpleNamespace(rdzv_handler=meeting(machines, closed)))
    with healthy, machines_may_change(tmp_path, "grpo.train"):
        assert LocalElasticAgent._monitor_workers(agent, group).state == state
    assert agent._remaining_restarts == (state == WorkerState.UNHEALTHY)


def test_only_a_machine_that_comes_gives_a_step_time_to_end(tmp_path: Path) -> None:
    given: list[float] = []
    agent = SimpleNamespace(_shutdown=lambda timeout: given.append(timeout), _shutdown_timeout=600)
    with machines_may_change(tmp_path, "grpo.train"):
        for state in (WorkerState.HEALTHY, WorkerState.FAILED, WorkerState.UNHEALTHY):
            LocalElasticAgent._stop_workers(agent, SimpleNamespace(state=state))
    assert given == [600, 30, 30]
