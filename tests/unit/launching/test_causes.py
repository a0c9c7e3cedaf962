"""Which of the processes of a machine has failed first."""

import signal
from types import SimpleNamespace

from grpo.launching.causes import first_cause


def failed(seconds: float, exitcode: int) -> SimpleNamespace:
    return SimpleNamespace(timestamp=seconds, exitcode=exitcode)


def test_a_process_that_was_ended_for_another_is_not_the_cause() -> None:
    failures = {0: failed(100, -signal.SIGTERM), 1: failed(101, 1), 2: failed(131, -signal.SIGKILL)}
    assert first_cause(failures)[0] == 1


def test_a_process_that_is_killed_at_once_is_the_cause() -> None:
    failures = {0: failed(101, 1), 1: failed(100, -signal.SIGKILL), 2: failed(102, -signal.SIGTERM)}
    assert first_cause(failures)[0] == 1
