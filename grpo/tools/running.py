"""Tools and environments as TRL takes them; each call runs in another process, and none can hang or end a run.

A call that raises, hangs or dies ends in a `ToolError`, which TRL shows to the model as the tool's result.
"""

import contextlib
import inspect
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from transformers.utils.chat_template_utils import get_json_schema

from grpo.config.mixture import has_own_tools, single_tasks, where
from grpo.config.tools import environment_args
from grpo.utils.distributed import log_name
from grpo.utils.errors import ConfigError
from rewards.isolation.call import PLAIN
from rewards.isolation.process import GRACE, Process, ask

log = logging.getLogger(__name__)
FAILED = "The environment could not begin"
"""Beginning of the text that a policy reads where `reset` has failed."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ToolError(RuntimeError):
    """A call of a tool that failed; the text is for the model, `where` (reason, file and line) for people."""

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.where = where or text


class Source:
    """The process that has loaded tools or an environment, and forks for each instance.

    Args:
        names: `path/to/file.py:name`, `package.module.name` or entry points of `grpo.tools`: functions, or one class.
        is_environment: whether the name is a class; None detects it.
        timeout: limit of a call, seconds.
        output: file for the output of the functions; None is the output of this process.
        arguments: positional and keyword arguments of the class.

    Raises:
        ValueError: a name cannot be loaded, or described to a model; a line with the reason.
    """

    def __init__(
        self,
        names: Sequence[str],
        is_environment: bool | None,
        timeout: float,
        output: Any = None,
        arguments: Arguments = ((), {}),
    ) -> None:
        self.timeout, self.errors, self.calls = timeout, Counter[str](), Counter[str]()
        self._reported = set[str]()
        self._one_at_a_time = threading.Lock()  # threads start instances, and count their calls
        named = (list(names), is_environment, arguments)
        self._start = partial(Process, "grpo.tools.worker", named, names[0], output)
        self.process = self._start()
        self.description: dict[str, Any] = self.process.loaded
        if problem := self._undescribed():
            self.close()
            raise ValueError(problem)

    def _undescribed(self) -> str | None:
        """Return why a tool cannot be described to a model; None if it can."""
        for tool in self.descriptions():
            try:
                get_json_schema(tool)
            except Exception as error:
                return f"{tool.__name__}: {' '.join(str(error).split())}"
        if not self.description["tools"]:
            return f"{self.description['name']}: there is no method that a model could call"
        return None

    def fork(self) -> tuple[Connection, int]:
        """Start a process for a set of these tools, or for an environment; return the line to it and its number.

        Raises:
            ToolError: the system refuses another process or file; the processes in use are not touched.
        """
        with self._one_at_a_time:
            return self._started()

    def _started(self) -> tuple[Connection, int]:
        try:
            if not self.process.connection.closed:
                return self._fork()
        except (EOFError, OSError):  # something has ended the process that forks, and with it all that it has forked
            self.close()
        try:
            self.process = self._start()
            return self._fork()
        except (EOFError, OSError, ValueError) as error:
            raise ToolError(f"its process could not be started: {error}") from error

    def _fork(self) -> tuple[Connection, int]:
        connection = self.process.connection
        with contextlib.ExitStack() as stack:
            try:  # all files that this takes, before anything is sent: a refusal leaves no half of a message
                line, theirs = map(stack.enter_context, socket.socketpair())
                parent = stack.enter_context(socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM))
            except OSError as error:
                raise ToolError(f"its process could not be started: {error.strerror}") from error
            connection.send("fork")
            sendfds(parent, [theirs.fileno()])
            number, refused = connection.recv()
            if refused:
                raise ToolError(f"its process could not be started: {refused}")
            return Connection(line.detach()), number

    def described(self, name: str, function: Callable[..., Any], *first: inspect.Parameter) -> Callable[..., Any]:
        """Return a function of keyword arguments with the name, docstring and signature of a tool, after `first`."""
        function.__name__, (function.__doc__, signature) = name, self.description["tools"][name]
        parameters = signature.parameters.values()
        function.__signature__ = signature.replace(parameters=[*first, *parameters])  # type: ignore[attr-defined]
        hints = {
            **{parameter.name: parameter.annotation for parameter in parameters},
            "return": signature.return_annotation,
        }
        function.__annotations__ = {key: hint for key, hint in hints.items() if hint is not inspect.Signature.empty}
        return function

    def descriptions(self) -> list[Callable[..., Any]]:
        """Return functions that describe each tool, and that nothing calls."""
        return [self.described(name, lambda **arguments: None) for name in self.description["tools"]]

    def count_call(self, name: str) -> None:
        """Count a call."""
        with self._one_at_a_time:
            self.calls[name] += 1

    def count_error(self, name: str, error: ToolError) -> None:
        """Count a call that failed, and log the first of its kind."""
        with self._one_at_a_time:
            self.errors[name] += 1
        kind = f"{name} {str(error).partition(':')[0]}"
        if kind not in self._reported:
            self._reported.add(kind)
            log.warning("tool %s failed, which the model is shown: %s", name, error.where)

    def close(self) -> None:
        """End the process and all instances."""
        self.process.stop()


class Instance:
    """A set of tools, or an environment, in a process of its own."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._line: Connection | None = None
        self._one_at_a_time = threading.Lock()  # rewards of a batch run concurrently, and all may read an environment

    def call(self, name: str | None, arguments: dict[str, Any], starts: bool = False) -> Any:
        """Call a method and return its result; None returns the public attributes. The source counts the call.

        Args:
            starts: whether the instance gets a process if it has none; otherwise the call fails.

        Raises:
            ToolError: the method raised, took too long or died, or there is no process.
        """
        self._source.count_call(str(name))
        try:
            with self._one_at_a_time:
                if self._line is None and starts:
                    self._line, self.process = self._source.fork()
                    self._parent = self._source.process.connection
                return self._called(name, arguments)
        except ToolError as error:
            self._source.count_error(str(name), error)
            raise

    def _called(self, name: str | None, arguments: dict[str, Any]) -> Any:
        if self._line is None:
            raise ToolError("its process has ended")
        start, timeout = time.monotonic(), self._source.timeout
        try:
            result, failed, where = ask(self._line, (timeout, name, arguments), timeout + GRACE)
        except (EOFError, OSError):
            hung = time.monotonic() - start >= timeout
            self.end()
            reason = f"took longer than {timeout:g} s and was stopped" if hung else "its process ended"
            raise ToolError(reason) from None
        if failed:
            raise ToolError(failed, where)
        return result

    def end(self) -> None:
        """End the process, if there is one; what it has kept of an episode goes with it."""
        if self._line is None:
            return
        self._line.close()
        self._line = None
        with contextlib.suppress(OSError):  # the parent has ended, and with it all its children
            self._parent.send(self.process)  # it alone knows whether the number is still that of its child


def tools_of(source: Source) -> list[Callable[..., Any]]:
    """Return the tools of a source in TRL's form: functions of a single process, which restarts if it ends."""
    instance = Instance(source)

    def function(name: str) -> Callable[..., Any]:
        return source.described(name, lambda **arguments: instance.call(name, arguments, starts=True))

    return [function(name) for name in source.description["tools"]]


class Environment:
    """An environment as TRL takes it, which lives in a process of its own; subclasses have its tools."""

    _source: Source

    def __init__(self) -> None:
        self._instance = Instance(self._source)  # without a process until `reset`, which can say that it was refused
        self._refused: str | None = None  # why the episode has not begun

    def reset(self, **columns: Any) -> Any:
        """Begin an episode with the columns of a row, and return the text that is appended to the prompt."""
        row = {name: value for name, value in columns.items() if is_plain(value)}
        try:
            text, self._refused = self._instance.call("reset", row, starts=True), None
            return text
        except ToolError as error:
            self._instance.end()  # with the last episode, on which the tools of this one would act
            self._refused = f"{FAILED}: {error}"
            return f" {self._refused}"

    def _acted(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the result of a tool, or why the episode has not begun."""
        return self._refused or self._instance.call(name, arguments)

    def _state(self) -> dict[str, Any]:
        """Return its public attributes; none if it has failed."""
        try:
            return self._instance.call(None, {})
        except ToolError:
            return {}

    def _reward(self) -> float | None:
        """Return the reward of an episode; None, which TRL skips, if the environment has failed."""
        try:
            return self._instance.call("get_reward", {})
        except ToolError:
            return None


def environment_of(source: Source) -> type[Environment]:
    """Return a class like the environment's, each of whose instances lives in a process of its own."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    def method(name: str) -> Callable[..., Any]:
        return source.described(name, lambda self, **arguments: self._acted(name, arguments), first)

    methods: dict[str, Any] = {name: method(name) for name in source.description["tools"]}
    if source.description["scores"]:
        methods["get_reward"] = Environment._reward
    return type(source.description["name"], (Environment,), {"_source": source, **methods})


def is_plain(value: Any) -> bool:
    """Whether a value of the data can go to another process: not an image."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or type(value) in PLAIN


@dataclass
class Tools:
    """The tools and the environment of a task."""

    functions: list[Callable[..., Any]] = field(default_factory=list)
    """TRL's `tools`."""
    environment: type | dict[str, type] | None = None
    """TRL's `environment_factory`; by task where tasks of a mixture have others."""
    sources: list[Source] = field(default_factory=list)
    by_task: dict[str, list[Source]] = field(default_factory=dict)
    """The sources of each task of a mixture whose tasks have others."""

    def described(self, task: str = "") -> list[Callable[..., Any]]:
        """Return functions with the name, docstring and types of all that prompts of a task describe."""
        return [tool for source in self.by_task.get(task, self.sources) for tool in source.descriptions()]

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return calls and errors of this process so far, by tool."""
        calls = sum((source.calls for source in self.sources), Counter[str]())
        return calls, sum((source.errors for source in self.sources), Counter[str]())


def arguments_of(task: DictConfig) -> Arguments:
    """Return the arguments of a task's environment: `task.environment_id`, if there is one, and `environment_args`."""
    return (() if task.environment_id is None else (task.environment_id,)), environment_args(task)


@contextlib.contextmanager
def running_tools(task: DictConfig, run_dir: Path) -> Iterator[Tools]:
    """Context with the running tools and environment of a task, or of the tasks of a mixture.

    Their output is in the run's log. Where tasks have other tools, each is an environment of TRL.

    Raises:
        ConfigError: a tool or the environment cannot be loaded, or described to a policy.
    """
    with contextlib.ExitStack() as stack:
        if not has_own_tools(task):
            yield start_tools(task, "task", run_dir, stack)
            return
        loaded = {name: start_tools(single, where(name), run_dir, stack) for name, single in single_tasks(task).items()}
        environments = {name: environment_with(tools.sources) for name, tools in loaded.items()}
        by_task = {name: tools.sources for name, tools in loaded.items()}
        yield Tools([], environments, [source for sources in by_task.values() for source in sources], by_task)


def start_tools(task: DictConfig, place: str, run_dir: Path, stack: contextlib.ExitStack) -> Tools:
    """Start the tools and the environment of a task, which is at this place in the configuration."""
    tools = Tools()
    named = {"tools": list(task.tools), "environment": [task.environment] if task.environment else []}
    for key, names in named.items():
        if not names:
            continue
        output = stack.enter_context((run_dir / log_name()).open("a"))
        try:
            source = Source(names, key == "environment", task.tool_timeout, output, arguments_of(task))
        except ValueError as error:
            raise ConfigError(f"{place}.{key}: {error}") from error
        stack.callback(source.close)
        tools.sources.append(source)
        if key == "tools":
            tools.functions = tools_of(source)
        else:
            tools.environment = environment_of(source)
    return tools


def environment_with(sources: Sequence[Source]) -> type:
    """Return an environment of TRL with what the sources of a task have.

    Tools without an environment begin with nothing and have no reward; all episodes share their process, as they do
    where all tasks have the same tools.
    """
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds: list[type] = []
    methods: dict[str, Any] = {}
    for source in sources:
        if source.description["name"]:  # a class
            kinds.append(environment_of(source))
            continue
        instance = Instance(source)

        def method(name: str, source: Source = source, instance: Instance = instance) -> Callable[..., Any]:
            return source.described(name, lambda self, **arguments: instance.call(name, arguments, starts=True), first)

        methods |= {name: method(name) for name in source.description["tools"]}
    if not kinds:
        methods |= {"reset": lambda self, **columns: None, "_state": lambda self: {}}
    return type(kinds[0].__name__ if kinds else "Tools", tuple(kinds), methods)
