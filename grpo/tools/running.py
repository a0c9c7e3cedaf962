"""The tools and the environment of a run, each in processes of their own, until the run ends."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.tools.isolation import Source, environment_of, tools_of
from grpo.utils.distributed import log_name
from grpo.utils.errors import ConfigError


@dataclass
class Tools:
    """What the policy of a task may call."""

    functions: list[Callable[..., Any]] = field(default_factory=list)
    """TRL's `tools`."""
    environment: type | None = None
    """TRL's `environment_factory`."""
    sources: list[Source] = field(default_factory=list)

    def described(self) -> list[Callable[..., Any]]:
        """Return functions with the name, docstring and types of all that prompts describe."""
        return [tool for source in self.sources for tool in source.descriptions()]

    def counts(self) -> tuple[Counter[str], Counter[str]]:
        """Return calls and errors of this process so far, by tool."""
        calls = sum((source.calls for source in self.sources), Counter[str]())
        return calls, sum((source.errors for source in self.sources), Counter[str]())


@contextmanager
def running_tools(task: DictConfig, run_dir: Path) -> Iterator[Tools]:
    """Start the tools and the environment of a task, whose output is in the run's log, and end them on the way out.

    Raises:
        ConfigError: one cannot be loaded, or described to a policy.
    """
    tools = Tools()
    named = {"tools": list(task.tools), "environment": [task.environment] if task.environment else []}
    with ExitStack() as stack:
        for key, names in named.items():
            if not names:
                continue
            output = stack.enter_context((run_dir / log_name()).open("a"))
            try:
                source = Source(names, key == "environment", task.tool_timeout, output)
            except ValueError as error:
                raise ConfigError(f"task.{key}: {error}") from error
            stack.callback(source.close)
            tools.sources.append(source)
            if key == "tools":
                tools.functions = tools_of(source)
            else:
                tools.environment = environment_of(source)
        yield tools
