"""Tools and environments as TRL takes them; each call runs in another process, and none can hang or end a run."""

import contextlib
import inspect
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from PIL import Image

from grpo.config.mixture import has_own_tools, single_tasks, where
from grpo.config.tools import environment_args
from grpo.tools.processes import Arguments, Instance, Source, ToolError
from grpo.utils.distributed import log_name
from grpo.utils.errors import ConfigError
from rewards.isolation.call import PLAIN

FAILED = "The environment could not begin"
"""Beginning of the text that a policy reads where `reset` has failed."""


def tools_of(source: Source) -> list[Callable[..., Any]]:
    """Return the tools of a source in TRL's form: functions of a single process, which restarts if it ends."""
    instance = Instance(source)

    def function(name: str) -> Callable[..., Any]:
        return source.described(name, lambda **arguments: opened(instance.call(name, arguments, starts=True)))

    return [function(name) for name in source.description["tools"]]


def opened(result: Any) -> Any:
    """Return the result of a tool with its images as pictures."""
    if not isinstance(result, list):
        return result
    return [
        {"type": "image", "image": Image.open(io.BytesIO(part["image"]))} if part["type"] == "image" else part
        for part in result
    ]


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
        return self._refused or opened(self._instance.call(name, arguments))

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
