"""Tools and environments as TRL takes them; each call runs in another process, and none can hang or end a run.

A call that raises, hangs or dies ends in a `ToolError`, which TRL shows to the model as the tool's result.
"""

import contextlib
import inspect
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from rewards.isolation.call import PLAIN
from rewards.isolation.process import IMPORT_LIMIT, check_system, end_process, start_process

log = logging.getLogger(__name__)
FAILED = "The environment could not begin"
"""Beginning of the text that a policy reads where `reset` has failed."""


class ToolError(RuntimeError):
    """A call of a tool that failed; the text is for the model.

    Args:
        where: reason, file and line, for people.
    """

    def __init__(self, text: str, where: str = "") -> None:
        super().__init__(text)
        self.where = where or text


class Source:
    """The process that has loaded tools or an environment, and that forks for each instance of them.

    Args:
        names: `path/to/file.py:name`, `package.module.name` or entry points of `grpo.tools`: functions, or one class.
        is_environment: whether it is a class; None finds out.
        timeout: limit of a call, seconds.
        output: file for what the functions print; None is the output of this process.

    Raises:
        ValueError: one cannot be loaded, or described to a model; one line with the reason.
    """

    def __init__(self, names: Sequence[str], is_environment: bool | None, timeout: float, output: Any = None) -> None:
        self.timeout, self.errors, self.calls = timeout, Counter[str](), Counter[str]()
        self._reported = set[str]()
        check_system()
        self._named, self._output = (list(names), is_environment), output
        problem = self._start()
        if problem is None:
            problem = self._undescribed()
        if problem is not None:
            self.close()
            raise ValueError(problem)

    def _start(self) -> str | None:
        """Start the process; return why it has not loaded what is named, None if it has."""
        first = self._named[0][0]
        self.process, self.connection = start_process("grpo.tools.worker", self._output)
        self.connection.send(self._named)
        problem: str | None = f"{first}: its process ended while it was imported"
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(IMPORT_LIMIT):
                problem, self.description = self.connection.recv()
            else:
                problem = f"{first}: not imported after {IMPORT_LIMIT:.0f} s"
        return problem

    def _undescribed(self) -> str | None:
        """Return why a model cannot be told about a tool; None if it can."""
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
        try:
            if not self.connection.closed:
                return self._fork()
        except (EOFError, OSError):  # something has ended the process that forks, and with it all that it has forked
            self.close()
        try:
            self._start()
            return self._fork()
        except (EOFError, OSError) as error:
            raise ToolError(f"its process could not be started: {error}") from error

    def _fork(self) -> tuple[Connection, int]:
        with contextlib.ExitStack() as stack:
            try:  # all files that this takes, before anything is sent: a refusal leaves no half of a message
                line, theirs = map(stack.enter_context, socket.socketpair())
                parent = socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:
                raise ToolError(f"its process could not be started: {error.strerror}") from error
            stack.enter_context(parent)
            self.connection.send("fork")
            sendfds(parent, [theirs.fileno()])
            number, refused = self.connection.recv()
            if refused:
                raise ToolError(f"its process could not be started: {refused}")
            return Connection(line.detach()), number

    def described(self, name: str, function: Callable[..., Any], is_method: bool = False) -> Callable[..., Any]:
        """Return a function of keyword arguments with the name, docstring and signature of a tool."""
        text, parameters, result = self.description["tools"][name]
        kind, nothing = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        given = [inspect.Parameter("self", kind)] if is_method else []
        given += [
            inspect.Parameter(key, kind, default=default if has_default else nothing, annotation=hint)
            for key, hint, has_default, default in parameters
        ]
        function.__name__, function.__doc__ = name, text
        function.__signature__ = inspect.Signature(given, return_annotation=result)  # type: ignore[attr-defined]
        hints = {key: hint for key, hint, _, _ in parameters if hint is not nothing}
        function.__annotations__ = hints if result is nothing else {**hints, "return": result}
        return function

    def descriptions(self) -> list[Callable[..., Any]]:
        """Return functions that describe each tool, and that nothing calls."""
        return [self.described(name, lambda **arguments: None) for name in self.description["tools"]]

    def call(self, instance: "Instance", name: str | None, arguments: dict[str, Any], starts: bool = False) -> Any:
        """Call a method of an instance, and count the call.

        Args:
            starts: whether the instance gets a process if it has none; otherwise the call fails.

        Raises:
            ToolError: it failed.
        """
        self.calls[str(name)] += 1
        try:
            if starts:
                instance.start()
            return instance.call(name, arguments, self.timeout)
        except ToolError as error:
            self.errors[str(name)] += 1
            kind = f"{name} {str(error).partition(':')[0]}"
            if kind not in self._reported:
                self._reported.add(kind)
                log.warning("tool %s failed, which the model is shown: %s", name, error.where)
            raise

    def close(self) -> None:
        """End the process and all instances."""
        if self.connection.closed:
            return
        self.connection.close()
        end_process(self.process)


class Instance:
    """A set of tools, or an environment, in a process of its own."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._line: Connection | None = None

    def start(self) -> None:
        """Start its process, unless it is there.

        Raises:
            ToolError: the system refuses another process or file.
        """
        if self._line is None:
            self._line, self.process = self._source.fork()
            self._parent = self._source.connection

    def call(self, name: str | None, arguments: dict[str, Any], timeout: float) -> Any:
        """Call a method and return its result; None asks for the public attributes.

        Raises:
            ToolError: the method raised, took too long or died, or there is no process.
        """
        if self._line is None:
            raise ToolError("its process has ended")
        start = time.monotonic()
        with contextlib.suppress(EOFError, OSError):
            self._line.send((name, arguments, timeout))
            if self._line.poll(timeout + 1):
                result, failed, where = self._line.recv()
                if failed:
                    raise ToolError(failed, where)
                return result
        self.end()
        hung = time.monotonic() - start >= timeout
        raise ToolError(f"took longer than {timeout:g} s and was stopped" if hung else "its process ended")

    def end(self) -> None:
        """End the process: its parent does, which alone knows whether the number is still that of its child."""
        if self._line is not None:
            self._line.close()
            self._line = None
            with contextlib.suppress(OSError):  # the parent has ended, and with it all its children
                self._parent.send(self.process)


def tools_of(source: Source) -> list[Callable[..., Any]]:
    """Return the tools of a source as TRL takes them: functions of one process, which is started again if it ends."""
    instance = Instance(source)

    def function(name: str) -> Callable[..., Any]:
        def tool(**arguments: Any) -> Any:
            return source.call(instance, name, arguments, starts=True)

        return source.described(name, tool)

    return [function(name) for name in source.description["tools"]]


class Environment:
    """An environment as TRL takes it, which lives in a process of its own; subclasses have its tools."""

    _source: Source

    def __init__(self) -> None:
        self._instance = Instance(self._source)  # without a process until `reset`, which can say that it was refused

    def reset(self, **columns: Any) -> Any:
        """Begin an episode with the columns of a row, and return what is added to the prompt."""
        given = {name: value for name, value in columns.items() if is_plain(value)}
        try:
            return self._source.call(self._instance, "reset", given, starts=True)
        except ToolError as error:
            return f" {FAILED}: {error}"

    def _state(self) -> dict[str, Any]:
        """Return its public attributes; none if it has failed."""
        try:
            return self._source.call(self._instance, None, {})
        except ToolError:
            return {}


def get_reward(self: Environment) -> float | None:
    """Return the reward of an episode; None, which TRL skips, if the environment has failed."""
    try:
        return self._source.call(self._instance, "get_reward", {})
    except ToolError:
        return None


def environment_of(source: Source) -> type[Environment]:
    """Return a class like the environment's, each of whose instances lives in a process of its own."""

    def method(name: str) -> Callable[..., Any]:
        def tool(self: Environment, **arguments: Any) -> Any:
            return source.call(self._instance, name, arguments)

        return source.described(name, tool, is_method=True)

    methods: dict[str, Any] = {name: method(name) for name in source.description["tools"]}
    if "get_reward" in source.description["own"]:
        methods["get_reward"] = get_reward
    return type(source.description["name"], (Environment,), {"_source": source, **methods})


def is_plain(value: Any) -> bool:
    """Whether a value of the data can go to another process: not an image."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    return value is None or type(value) in PLAIN
