"""No signal goes to a number that another process may have got by then."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rewards.isolation.process import end_process, has_ended
from rewards.isolation.reward import Reward
from rewards.sandbox.verdict import verdict


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each number that was signalled was taken at that time."""
    seen: list[bool] = []

    def noted(real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def kill(number: int, which: int) -> None:
            seen.append(is_taken(number))
            real(number, which)

        return kill

    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, noted(getattr(os, name)))
    return seen


def is_taken(number: int) -> bool:
    """Whether a number is that of a process, ended or not; without a signal, which `taken` would see."""
    return Path(f"/proc/{number}").exists()


def started(code: str) -> subprocess.Popen[str]:
    """A leader of a group that prints a line at its start."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"print(1, flush=True); {code}"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    with process.stdout as output:
        output.readline()
    return process


@pytest.mark.parametrize(("code", "status"), [("exit(3)", 3), ("input()", 1), ("import time; time.sleep(60)", -15)])
def test_a_process_keeps_its_number_until_it_is_signalled(code: str, status: int, taken: list[bool]) -> None:
    process = started(code)
    assert has_ended(process, 0 if status == -15 else 20) == (status != -15)
    assert is_taken(process.pid)
    end_process(process)
    assert process.returncode == status
    assert taken
    assert all(taken)
    end_process(process)
    assert has_ended(process)
    assert len(taken) == (2 if status == -15 else 1), "nothing once it has been waited for"


def test_a_process_is_waited_for_as_long_as_asked() -> None:
    process = started("import time; time.sleep(60)")
    begun = time.monotonic()
    assert not has_ended(process, 0.3)
    assert 0.3 <= time.monotonic() - begun < 5
    end_process(process)


@pytest.mark.parametrize("way", ["dies", "is killed between two calls"])
def test_a_reward_that_has_ended_is_signalled_at_its_number(way: str, tmp_path: Path, taken: list[bool]) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\ndef f(completions):\n    if 'die' in completions: os._exit(3)\n    return [1.0]\n"
    )
    reward = Reward(f"{tmp_path}/mine.py:f", "mine")
    if way == "dies":
        assert reward.score(completions=["die"]) == [None]
    else:
        supervisor = reward._workers[0].process
        os.kill(supervisor.pid, signal.SIGKILL)
        assert has_ended(supervisor, 10)
    assert reward.score(completions=["a"]) == [1.0]
    reward.close()
    assert len(taken) >= 2
    assert all(taken)


@pytest.mark.parametrize("program", ["def f():\n    return 1", "def f():\n    return 2", "import os\nos._exit(0)"])
def test_processes_of_a_verdict_are_signalled_at_their_numbers(program: str, taken: list[bool]) -> None:
    assert verdict(program, "assert f() == 1", None, 20, 500, boxed=False) == float("1" in program)
    assert taken == [True, True]


def test_tests_that_do_not_fit_into_a_pipe_are_read() -> None:
    tests = "\n".join(["assert f() == 1"] * 20_000)
    assert verdict("def f():\n    return 1", tests, None, 20, 500, boxed=False) == 1.0


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="need Linux or macOS, and this is Windows: use WSL2"):
        Reward("rewards.brevity.brevity", "brevity")
