"""Tools and environments that raise, hang, die and eat memory, each in a process of its own."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from transformers.utils.chat_template_utils import get_json_schema

from grpo.tools.processes import Source, ToolError
from grpo.tools.running import FAILED, environment_of, running_tools, tools_of

TOOLS = '''
import os, signal, time
from typing import Literal

def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: The first
        b: The second
    """
    return a + b

async def later(text: str, kind: Literal["upper", "lower"]) -> str:
    """Change a text.

    Args:
        text: Any
        kind: The case
    """
    return getattr(text, kind)()

def look(beside: bool) -> list:
    """Return a picture.

    Args:
        beside: Whether a text is beside it
    """
    from PIL import Image

    picture = Image.new("RGB", (2, 2))
    return [{"type": "text", "text": "a"}, {"type": "image", "image": picture}] if beside else picture

def hangs(seconds: float) -> str:
    """Hang.

    Args:
        seconds: For how long
    """
    while True:
        pass

def dies(status: int) -> str:
    """Die.

    Args:
        status: Any
    """
    os._exit(status)

def where() -> int:
    """Return the process."""
    return os.getpid()

def half(fails: bool = False) -> str:
    """Return half of a UTF-16 pair.

    Args:
        fails: Whether it is in the text of an exception
    """
    if fails:
        raise ValueError("7 \\ud800")
    return "7 \\ud800"

def forks() -> str:
    """Fork, and return the status of the child."""
    child = os.fork()
    if child == 0:
        raise SystemExit(3)
    return str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def repeats(count: int) -> str:
    """Repeat.

    Args:
        count: How often
    """
    return "ab" * count

def untyped(a):
    """Untyped.

    Args:
        a: Any
    """

def silent(a: int) -> int:
    return a

class Counter:
    def __init__(self):
        self.count, self._private = 0, object()

    def reset(self, start: int = 0, **columns):
        if start == 13:
            raise ConnectionError("busy")
        self.count, self.columns = start, sorted(columns)
        return f"at {start}" if start else None

    def add(self, number: int) -> str:
        """Add.

        Args:
            number: Any
        """
        if number < 0:
            os._exit(1)
        self.count += number
        return str(self.count)

    def process(self) -> str:
        """Return the process."""
        return str(os.getpid())

    def hang(self) -> str:
        """Hang where nothing in its process can end it."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def get_reward(self) -> float:
        return self.count / 10

class NoReset:
    def add(self, number: int) -> str:
        """Add.

        Args:
            number: Any
        """

class NoTools:
    def reset(self):
        return ""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tools") / "my_tools.py"
    file.write_text(TOOLS)
    return file


@pytest.fixture(scope="module")
def source(file: Path) -> Iterator[Source]:
    names = ("add", "later", "look", "hangs", "dies", "where", "repeats", "half", "forks")
    source = Source([f"{file}:{name}" for name in names], is_environment=False, timeout=1.0)
    yield source
    source.close()


@pytest.fixture
def tools(source: Source) -> dict[str, Callable[..., Any]]:
    return {tool.__name__: tool for tool in tools_of(source)}


def test_a_tool_returns_text_and_is_described_as_its_function_is(tools: dict[str, Callable[..., Any]]) -> None:
    assert tools["add"](a=1) == "3"
    assert tools["add"](a=1, b=5) == "6"
    assert tools["later"](text="Ab", kind="upper") == "AB"
    assert int(tools["where"]()) != os.getpid()
    described = get_json_schema(tools["add"])["function"]
    assert described["description"] == "Add two numbers."
    assert described["parameters"]["required"] == ["a"]
    assert described["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second"}
    kind = get_json_schema(tools["later"])["function"]["parameters"]["properties"]["kind"]
    assert kind["enum"] == ["upper", "lower"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("add", {"a": "one"}, 'TypeError: can only concatenate str (not "int") to str'),
        ("add", {"c": 1}, "TypeError: add() got an unexpected keyword argument 'c'"),
        ("hangs", {"seconds": 9.0}, "took longer than 1 s and was stopped"),
        ("dies", {"status": 0}, "its process ended"),
    ],
)
def test_a_tool_that_fails_says_so_and_the_next_call_works(
    name: str, arguments: dict[str, Any], says: str, tools: dict[str, Callable[..., Any]], source: Source
) -> None:
    before = source.errors[name], source.calls[name]
    with pytest.raises(ToolError) as caught:
        tools[name](**arguments)
    assert str(caught.value) == says
    assert tools["add"](a=1) == "3"
    assert source.errors[name] == before[0] + 1
    assert source.calls[name] > before[1]


def test_a_result_without_end_is_cut(tools: dict[str, Callable[..., Any]]) -> None:
    assert len(tools["repeats"](count=10_000_000)) == 100_001


@pytest.mark.parametrize("beside", [True, False])
def test_an_image_as_a_result_is_a_part_of_the_message(tools: dict[str, Callable[..., Any]], beside: bool) -> None:
    *texts, part = tools["look"](beside=beside)
    assert texts == [{"type": "text", "text": "a"}] * beside
    assert (part["type"], part["image"].size, part["image"].mode) == ("image", (2, 2), "RGB")


def test_the_text_of_a_tool_is_valid_unicode(tools: dict[str, Callable[..., Any]]) -> None:
    assert tools["half"]() == "7 \ufffd"
    with pytest.raises(ToolError, match="7 \ufffd"):
        tools["half"](fails=True)


def test_a_child_that_a_tool_forks_ends_where_it_exits(tools: dict[str, Callable[..., Any]]) -> None:
    assert tools["forks"]() == "3"


def test_each_environment_has_a_state_and_a_process_of_its_own(file: Path) -> None:
    source = Source([f"{file}:Counter"], is_environment=True, timeout=5.0)
    kind = environment_of(source)
    assert kind.__name__ == "Counter"
    one, other = kind(), kind()
    assert one.reset(start=3, image=object(), answer="5") == "at 3"
    assert other.reset() is None
    assert (one.add(number=4), other.add(number=1)) == ("7", "1")
    assert (one.get_reward(), other.get_reward()) == (0.7, 0.1)
    assert one._state() == {"count": 7, "columns": ["answer"]}
    assert len({one.process(), other.process(), str(os.getpid())}) == 3
    with pytest.raises(ToolError, match="its process ended"):
        one.add(number=-1)
    with pytest.raises(ToolError, match="its process has ended"):
        one.add(number=1)
    assert (one.get_reward(), one._state()) == (None, {})
    assert other.add(number=1) == "2"
    assert one.reset(start=1) == "at 1"
    assert one.add(number=1) == "2"
    processes = [int(each.process()) for each in (one, other)]
    source.close()
    assert comes_true(lambda: not any(map(is_running, processes)), 20)


def test_a_failed_reset_leaves_nothing_of_the_last_episode(file: Path) -> None:
    source = Source([f"{file}:Counter"], is_environment=True, timeout=5.0)
    counter = environment_of(source)()
    counter.reset(start=3)
    counter.add(number=4)
    assert f"{FAILED}: ConnectionError: busy" in counter.reset(start=13)
    assert counter.add(number=1) == f"{FAILED}: ConnectionError: busy"
    assert (counter.get_reward(), counter._state()) == (None, {})
    counter.reset(start=1)
    assert counter.add(number=1) == "2"
    source.close()


def test_threads_that_read_an_environment_get_their_own_answers(file: Path) -> None:
    source = Source([f"{file}:Counter"], is_environment=True, timeout=5.0)
    environment = environment_of(source)()
    environment.reset(start=0)
    with ThreadPoolExecutor(8) as threads:  # as rewards of a batch do
        added = threads.map(lambda number: (environment.add(number=1), environment._state()["count"])[0], range(200))
        assert sorted(map(int, added)) == list(range(1, 201))
    source.close()


PLACE = """
class Place:
    def __init__(self, name="none", far=False):
        self.name, self.far = name, far

    def reset(self, **columns):
        return f"at {self.name}"

    def look(self) -> str:
        "Look around."
        return f"{self.name} {self.far}"
"""


def test_environments_get_their_arguments_also_in_a_mixture(
    composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    of = {"environment": f"{tmp_path / 'place.py'}:Place", "conversational": "true", "environment_id": "park"}
    line = ["task=mixture", *(f"+task@task.tasks.{name}=arithmetic" for name in ("here", "there"))]
    line += [f"task.tasks.{name}.task.{key}={value}" for name in ("here", "there") for key, value in of.items()]
    with running_tools(composed(*line).task, tmp_path) as tools:
        assert isinstance(tools.environment, type)
        assert tools.environment().reset() == "at park"
    other = [*line, "task.tasks.there.task.environment_args={far: true}"]
    with running_tools(composed(*other).task, tmp_path) as tools:
        assert isinstance(tools.environment, dict)
        places = {name: kind() for name, kind in tools.environment.items()}
        assert {place.reset() for place in places.values()} == {"at park"}
        assert {name: place.look() for name, place in places.items()} == {"here": "park False", "there": "park True"}


def test_the_process_that_forks_is_started_again(file: Path) -> None:
    source = Source([f"{file}:Counter"], is_environment=True, timeout=5.0)
    source.process.process.kill()
    source.process.process.wait()
    environment = environment_of(source)()
    assert environment.reset(start=2) == "at 2"
    source.close()


def test_a_file_that_has_broken_since_the_start_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TOOLS)
    source = Source([f"{file}:Counter"], is_environment=True, timeout=5.0)
    file.write_text("raise KeyError('gone')\n")
    source.process.process.kill()
    source.process.process.wait()
    begun = environment_of(source)().reset()
    assert begun.startswith(" The environment could not begin: its process could not be started: ")
    assert "KeyError: 'gone'" in begun
    source.close()


def test_a_refused_start_costs_its_own_completion_only(file: Path) -> None:
    source = Source([f"{file}:Counter"], is_environment=True, timeout=5.0)
    kind = environment_of(source)
    first, limits = kind(), resource.getrlimit(resource.RLIMIT_NOFILE)
    assert first.reset(start=3) == "at 3"
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        others = [kind() for _ in range(40)]
        begun = [each.reset(start=1) for each in others]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    refused = begun.index(" The environment could not begin: its process could not be started: Too many open files")
    assert begun[:refused] == ["at 1"] * refused
    assert refused >= 10
    assert set(begun[refused:]) == {begun[refused]}
    assert f" {others[-1].add(number=1)}" == begun[refused], "its tools say so, too"
    assert (first.add(number=4), others[0].add(number=1)) == ("7", "2")
    assert others[-1].reset(start=2) == "at 2"
    source.close()


def test_a_refused_fork_costs_its_own_completion_only(file: Path, tmp_path: Path) -> None:
    refuses = tmp_path / "refuses.py"
    lines = "import errno\ndef fork(real=os.fork, left=[2]):\n    left[0] -= 1\n    if left[0] < 0:\n"
    lines += "        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
    lines += "    return real()\nos.fork = fork\n"
    refuses.write_text(TOOLS + lines)
    source = Source([f"{refuses}:Counter"], is_environment=True, timeout=5.0)
    one, other, refused = (environment_of(source)() for _ in range(3))
    assert [one.reset(start=1), other.reset(start=1)] == ["at 1"] * 2
    assert refused.reset() == (
        " The environment could not begin: its process could not be started: Resource temporarily unavailable"
    )
    assert source.errors["reset"] == 1
    assert (one.add(number=1), other.add(number=2)) == ("2", "3")
    source.close()


def test_a_number_that_another_process_has_got_is_not_killed(file: Path) -> None:
    source = Source([f"{file}:Counter"], is_environment=True, timeout=1.0)
    environment = environment_of(source)()
    environment.reset()
    first = int(environment.process())
    with pytest.raises(ToolError, match="took longer than 1 s"):
        environment.hang()
    assert comes_true(lambda: not is_running(first)), "a stopped process is ended by its parent"
    environment.reset()
    with subprocess.Popen(["sleep", "60"]) as other:
        environment._instance.process = other.pid
        with pytest.raises(ToolError, match="its process ended"):
            environment.add(number=-1)
        assert environment.reset(start=1) == "at 1"  # by then the parent has read what it was sent before
        assert other.poll() is None
        other.kill()
    source.close()


def test_tools_on_windows_are_one_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="training, rewards and tools need Linux or macOS, and this is Windows"):
        Source([f"{file}:add"], is_environment=False, timeout=1.0)


def comes_true(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether a condition comes true in time."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def is_running(process: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_file_that_ends_its_process_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os\nos._exit(3)\n")
    with pytest.raises(ValueError, match=r"ends\.py:f: its process ended while it was imported"):
        Source([f"{tmp_path}/ends.py:f"], is_environment=False, timeout=1.0)


@pytest.mark.parametrize(
    ("names", "is_environment", "says"),
    [
        (["untyped"], False, "untyped: Argument a is missing a type hint"),
        (["silent"], False, "silent: Cannot generate JSON schema for silent because it has no docstring!"),
        (["add", "add2"], False, "there is another tool of the name add"),
        (["Counter"], False, "a tool is a function; a class with tools is an environment: task.environment"),
        (["NoReset"], True, "NoReset has no method reset, which begins an episode; it has: add"),
        (["NoTools"], True, "NoTools: there is no method that a model could call"),
        (["missing"], False, "no function missing in"),
    ],
)
def test_what_cannot_be_used_is_explained(file: Path, names: list[str], is_environment: bool, says: str) -> None:
    copy = file.with_name("other.py")
    copy.write_text(TOOLS)
    places = [f"{copy}:add" if name == "add2" else f"{file}:{name}" for name in names]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Source(places, is_environment, timeout=1.0)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
