"""Rewards, tools and sandboxed code without what only Linux has: these calls are hidden, here and in the processes."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from grpo.tools.processes import Source, ToolError
from grpo.tools.running import environment_of, tools_of
from grpo.utils.priority import give_way
from rewards.code import check, code
from rewards.isolation.process import end_process, has_ended
from rewards.isolation.reward import Reward
from rewards.isolation.system import end_with_parent, file_without_name, processors
from tests.as_on_macos.sitecustomize import OF_LINUX

MINE = '''
import os, re, signal, subprocess, sys, time

def reward(completions):
    for text in completions:
        if text == "raise":
            raise KeyError("level")
        if text == "hang":
            while True:
                pass
        if text == "hold the interpreter":
            re.match("(a+)+$", "a" * 50 + "b")
        if text == "die":
            os._exit(3)
        if text == "kill the supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
    return [float(os.getpid())] * len(completions)

def leaves(completions, file):
    orphan = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); time.sleep(600);"
    orphan += repr(file)
    subprocess.run([sys.executable, "-c", orphan])
    child = subprocess.Popen(["sleep", "600"], env={})
    import psutil
    orphans = []
    while not orphans:
        found = psutil.process_iter(["cmdline", "ppid"])
        orphans = [one.pid for one in found if orphan in (one.info["cmdline"] or ()) and one.info["ppid"] == 1]
    with open(file, "w") as pids:
        print(os.getpid(), child.pid, *orphans, file=pids)
    if "hang" in completions:
        time.sleep(600)
    return [1.0] * len(completions)

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first
        b: The second
    """
    return a + b

def hangs(a: int) -> int:
    """Hang.

    Args:
        a: Any
    """
    while True:
        pass

class Counter:
    def reset(self):
        self.count = 0
        return "go"

    def up(self, by: int) -> str:
        """Count.

        Args:
            by: A number
        """
        self.count += by
        return str(self.count)
'''


@pytest.fixture(autouse=True)
def as_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AS_ON_MACOS", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "as_on_macos"))
    for module, names in OF_LINUX.items():
        for name in names:
            monkeypatch.delattr(module, name, raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return holds


def are_gone(numbers: list[int]) -> bool:
    """Whether processes have ended; nothing waits for orphans in a container without an init."""
    found = [psutil.Process(number) for number in numbers if psutil.pid_exists(number)]
    return all(one.status() == psutil.STATUS_ZOMBIE for one in found)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raise", "KeyError"),
        ("hang", "Timeout"),
        ("hold the interpreter", "Timeout"),
        ("die", "Died"),
        ("kill the supervisor", "Died"),
    ],
)
def test_a_bad_completion_costs_itself_alone(file: Path, text: str, kind: str) -> None:
    reward = Reward(f"{file}:reward", "mine", timeout=1)
    before, bad, after = reward.score(completions=["good", text, "good"])
    assert bad is None
    assert before
    assert after
    assert reward.errors == {kind: 1}
    reward.close()
    assert comes_true(lambda: are_gone([int(before), int(after)]), 10)


@pytest.mark.parametrize("text", ["close", "hang"])
def test_what_a_function_has_left_ends_with_it(file: Path, tmp_path: Path, text: str) -> None:
    pids = tmp_path / "pids"
    reward = Reward(f"{file}:leaves", "mine", {"file": str(pids)}, timeout=5)
    reward.score(completions=[text])
    reward.close()
    left = [int(number) for number in pids.read_text().split()]
    assert len(left) == 3
    assert comes_true(lambda: are_gone(left), 10)


def test_an_ended_process_is_seen_before_it_is_waited_for(file: Path) -> None:
    reward = Reward(f"{file}:reward", "mine")
    process = reward._workers[0].process
    os.kill(process.pid, signal.SIGKILL)
    assert has_ended(process, 10)
    assert process.returncode is None, "its number is taken until it is signalled"
    end_process(process)
    assert process.returncode == -signal.SIGKILL
    assert has_ended(process)
    reward.close()


def test_a_process_whose_parent_dies_gets_the_signal(tmp_path: Path) -> None:
    number = tmp_path / "number"
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            end_with_parent(signal.SIGTERM)
            number.write_text(str(os.getpid()))
            time.sleep(60)
        time.sleep(1)
        os._exit(0)
    os.waitpid(parent, 0)
    assert comes_true(lambda: are_gone([int(number.read_text())]), 10)


def test_tools_run_in_processes_that_may_hang_and_die(file: Path) -> None:
    source = Source([f"{file}:add", f"{file}:hangs"], None, timeout=1)
    add, hangs = tools_of(source)
    assert add(a=1, b=2) == "3"
    with pytest.raises(ToolError, match="took longer than 1 s"):
        hangs(a=1)
    assert add(a=2, b=2) == "4"
    source.close()
    environments = Source([f"{file}:Counter"], True, timeout=5)
    kind = environment_of(environments)
    first, second = kind(), kind()
    assert first.reset() == second.reset() == "go"
    assert (first.up(by=2), second.up(by=3), first.up(by=1)) == ("2", "3", "3")
    environments.close()


def test_code_runs_without_a_sandbox_only_if_that_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = ["def f():\n    return 1", "def f():\n    return 2"]
    assert code(programs, ["assert f() == 1"] * 2, seconds=10, sandbox="none") == [1.0, 0.0]
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    with pytest.raises(ValueError, match=r"no sandbox for Darwin on arm64; use Linux .* kwargs.sandbox=none"):
        check()


def test_small_calls_have_their_like_on_macos() -> None:
    descriptor = file_without_name("any")
    os.write(descriptor, b"text")
    assert os.pread(descriptor, 10, 0) == b"text"
    assert os.fstat(descriptor).st_nlink == 0
    os.close(descriptor)
    assert processors() == os.cpu_count()
    pid = os.fork()
    if pid == 0:
        give_way()
        os._exit(os.nice(0))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 19


def test_memory_is_limited_where_the_system_can() -> None:
    from rewards.sandbox.answer import limit

    pid = os.fork()
    if pid == 0:
        limit(8 * 1024, 1000)
        os._exit(resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
