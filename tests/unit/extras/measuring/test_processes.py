"""A case in a process of its own: an OOM, a crash and a case that takes too long end that case only."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from grpo.extras.measuring import processes, training
from grpo.extras.measuring.cases import Case
from grpo.utils.errors import DoesNotFit

CASE = Case("smollm2_135m", "full", 2, 32, 32, 8, ("model=smollm2_135m",), False, {"peak": 1.0})


def lacks_memory(*args: Any) -> dict[str, Any]:
    raise DoesNotFit("a completion does not fit")


def fails(*args: Any) -> dict[str, Any]:
    raise KeyError("/home/me")


def test_an_oom_and_an_error_are_outcomes_without_their_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "measure", lacks_memory)
    assert processes.outcome_of(CASE, "cpu") == ({"outcome": "out of memory"}, "")
    monkeypatch.setattr(training, "measure", fails)
    outcome, trace = processes.outcome_of(CASE, "cpu")
    assert outcome == {"outcome": "failed", "error": "KeyError"}
    assert "/home/me" in trace, "it is shown on the terminal"


def killed(case: Case, device: str, sender: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(case: Case, device: str, sender: Any) -> None:
    time.sleep(60)


def test_a_killed_and_a_slow_process_leave_the_command_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "report", killed)
    assert processes.in_process(CASE, "cpu", 60) == ({"outcome": "failed", "error": "exit status -9"}, "")
    monkeypatch.setattr(processes, "report", sleeps)
    started = time.monotonic()
    assert processes.in_process(CASE, "cpu", 1) == (None, "not done after 1 s")
    assert time.monotonic() - started < 30


def test_what_is_loaded_before_a_fork_does_not_initialize_cuda() -> None:
    """As bitsandbytes does, which asks for the capability of the GPU when it is imported."""
    code = f"import sys; [__import__(name) for name in {processes.PRELOADED}]; print('bitsandbytes' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
