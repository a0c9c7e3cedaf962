"""What processes agree on, where the store between them is gone; and which of them failed first."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import DistBackendError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from grpo.extras.testing.commands import Forked
from grpo.launching.causes import first_cause
from grpo.run import outcome
from grpo.run.live_page import LivePage
from grpo.trainer.measurements import MemoryReadings
from grpo.utils import distributed
from grpo.utils.errors import ConfigError, GenerationError, RunError


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_without_a_store_only_the_first_process_reports(
    monkeypatch: pytest.MonkeyPatch, rank: str, speaks: bool
) -> None:
    def gone() -> None:
        raise ConnectionError("the process that kept the store has ended")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(distributed, "store", gone)
    assert distributed.is_first_to_fail("a reason") == speaks
    assert distributed.first_failure() is None


TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("left", "refused"),
    [
        ({}, False),
        (TORCHRUN, False),
        ({"WORLD_SIZE": "1", "RANK": "0"}, False),
        ({"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "3"}, False),
        ({"WORLD_SIZE": "2"}, True),
        ({"RANK": "3"}, True),
        ({"LOCAL_RANK": "0"}, True),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, True),
        (TORCHRUN | {"RANK": "one"}, True),
        ({"WORLD_SIZE": ""}, True),
    ],
)
def test_variables_of_a_launcher_are_all_there_or_none(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, str], refused: bool
) -> None:
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(ConfigError, match=rf"^{next(iter(left))}=.*no launcher has started this process; `unset "):
            distributed.check_launcher()
    else:
        distributed.check_launcher()
        assert distributed.restarts() == 0
        assert left == TORCHRUN or not distributed.has_other_machines()


@pytest.mark.parametrize(
    ("codes", "rank"),
    [([1, -signal.SIGKILL], 1), ([-signal.SIGTERM, 1], 1), ([1, -signal.SIGTERM], 0), ([-signal.SIGSEGV, 1], 0)],
    ids=["killed", "stopped by the launcher", "the other way round", "crashed"],
)
def test_the_process_that_the_others_follow_is_named(codes: list[int], rank: int) -> None:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="") for rank, code in enumerate(codes)
    }
    assert first_cause(failures)[0] == rank


def test_a_process_killed_half_a_minute_later_is_not_the_cause() -> None:
    """torchelastic kills a process that waits in NCCL for the one that has failed."""
    codes = {0: (-signal.SIGKILL, 1030), 1: (1, 1000), 2: (-signal.SIGKILL, 1030), 3: (1, 1015)}
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="")
        for rank, (code, _) in codes.items()
    }
    for rank, (_, seconds) in codes.items():
        failures[rank].timestamp = seconds
    assert first_cause(failures)[0] == 1


STUCK = """
import ctypes, os, sys
from pathlib import Path
from grpo.run import outcome
from grpo.run.callbacks import StopOnSignal
from grpo.run.live_page import LivePage
from grpo.utils.distributed import agreed, is_first_to_fail, store
outcome.STUCK = 1.0
store()
with outcome.ends_when_stuck(Path(sys.argv[1]), LivePage(Path(sys.argv[1]))), StopOnSignal() as stop:
    stop.begin(None)
    agreed("a start", lambda: 1)
    if os.environ["RANK"] == "1":
        assert not sys.argv[2:] or is_first_to_fail(f"failed: {sys.argv[2]}")
        print("failed", flush=True)
        sys.stdin.read()
    mutex = (ctypes.c_char * 64)()
    wait = ctypes.CDLL(None).pthread_mutex_lock
    wait(mutex)
    print("waits", flush=True)
    wait(mutex)  # as in NCCL: no signal interrupts it, and no handler runs
"""


@pytest.mark.parametrize("reason", ["the reward is asleep", None])
def test_a_process_that_waits_in_c_ends_after_another_failed(tmp_path: Path, reason: str | None) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "running", "reason": None}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    (tmp_path / "stuck.py").write_text(STUCK)
    line = [sys.executable, str(tmp_path / "stuck.py"), str(tmp_path), *([reason] if reason else [])]
    processes = [
        Forked(
            line, env={**os.environ, **place, "RANK": rank}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        for process, said in zip(processes, ("waits", "failed"), strict=True):
            assert process.stdout
            assert process.stdout.readline() == f"{said}\n"
        processes[0].terminate()
        if reason:
            assert processes[0].wait(20) == distributed.LOST_STATUS
            assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "failed", "reason": reason}
        else:  # a run that is to stop has the time that its launcher gives it
            with pytest.raises(subprocess.TimeoutExpired):
                processes[0].wait(3)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_process_that_is_stopped_for_another_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped() -> dict[str, str]:
        with outcome.Outcome(tmp_path, None, MemoryReadings(on_gpu=False), LivePage(tmp_path)):
            raise KeyboardInterrupt("SIGTERM while evaluating")
        return json.loads((tmp_path / "summary.json").read_text())

    assert stopped()["status"] == "stopped", "nobody has failed"
    monkeypatch.setattr(outcome, "first_failure", lambda: "failed: the reward is asleep")
    with pytest.raises(RunError, match="failed: the reward is asleep"):
        stopped()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", "the reward is asleep")


@pytest.mark.parametrize(
    ("error", "is_loss"),
    [
        (RuntimeError("gloo: Read error [10.0.0.2]:29928: Connection timed out"), True),
        (DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("shape mismatch"), False),
        (GenerationError("the vLLM server failed: Connection reset by peer"), False),
    ],
)
def test_a_lost_connection_is_one_between_processes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_loss: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distributed.is_loss(error) == is_loss
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not distributed.is_loss(error)
