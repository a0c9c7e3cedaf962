"""Processes of tools and environments: one that loads them, and an instance, forked from it, for their calls.

A call that raises, hangs or dies ends in a `ToolError`, which TRL shows to the model as the tool's result.
"""

import contextlib
import inspect
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import sendfds
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from rewards.isolation.process import GRACE, Process, ask

log = logging.getLogger(__name__)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


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
