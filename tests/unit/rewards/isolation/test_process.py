"""No signal goes to a number that another process may have got by then."""

import math
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
from rewards.isolation.system import quota
from rewards.sandbox.verdict import verdict, was_starved


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


@pytest.mark.parametrize(
    ("code", "used", "starved"),
    [
        ("while True: pass", 0.0, True),
        ("while True: pass", 60.0, False),
        ("import time; time.sleep(60)", 0.0, False),
        ("import os; os.kill(os.getpid(), 19)", 0.0, False),
    ],
)
def test_only_what_would_run_is_starved(code: str, used: float, starved: bool) -> None:
    """A program that sleeps or stops itself is too slow; one that gets no processor is not."""
    process = started(code)
    time.sleep(0.3)
    assert was_starved(process, f"late {used} 1", 100.0) == starved
    end_process(process)


@pytest.mark.parametrize(
    ("cgroup", "files", "processors"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/a/b", {"cpu.max": "max 100000", "a/cpu.max": "150000 100000", "a/b/cpu.max": "400000 100000"}, 1.5),
        ("0::/a", {"a/cpu.max": "max 100000"}, math.inf),
        ("4:cpu,cpuacct:/\n0::/", {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.5),
        ("4:cpu:/docker/1", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf),
        (None, {}, math.inf),
    ],
)
def test_a_container_has_the_processors_of_its_quota(
    cgroup: str | None, files: dict[str, str], processors: float, tmp_path: Path
) -> None:
    for name, text in {
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert quota(tmp_path) == processors
