"""Tasksets of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers): rows, rewards, and the tools of episodes.

Processes of their own import this module: that of the taskset, of each reward, and of the tools. The trainer generates
as for any other task; clients, harnesses and runtimes of verifiers take no part.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

import verifiers.v1 as vf
from mcp.server.mcpserver import MCPServer
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke

from grpo.extras.environments.taskset import COLUMN

TASKSETS = "verifiers.v1.tasksets"
"""Package of the tasksets that come with verifiers."""
HOOKS = ("setup", "finalize")
NOT_TAKEN = {"stop": "ends episodes by conditions of its own", "intercept": "rewrites requests or responses"}


def load_taskset(environment_id: str, environment_args: dict[str, Any]) -> vf.Taskset:
    """Return the taskset of an installed package or of a file, `path/to/file.py`, which is loaded once.

    Raises:
        ValueError: there is no such taskset, or its configuration does not take the arguments.
    """
    return _loaded(environment_id, json.dumps(environment_args, sort_keys=True))


@cache
def _loaded(environment_id: str, arguments: str) -> vf.Taskset:
    name = _module(environment_id)
    if environment_id.endswith(".py"):
        if not Path(environment_id).is_file():
            raise ValueError(f"there is no file {Path(environment_id).absolute()}")
        sys.path.insert(0, str(Path(environment_id).parent.absolute()))
        name = Path(environment_id).stem
    modules = [module for module in (f"{TASKSETS}.{name}", name) if find_spec(module)]
    if not modules:
        raise ValueError(f"no module {name} is installed; install the taskset, or name its file, path/to/file.py")
    import_module(modules[0])  # verifiers hides what an import lacks
    if vf.environment_class(name) is not vf.SingleAgentEnv:
        raise ValueError("has an Env of its own, which runs the agents; only what a taskset describes is taken")
    config = vf.taskset_config_type(name).model_validate({**json.loads(arguments), "id": name})
    return vf.load_taskset(config)


def _module(environment_id: str) -> str:
    """Return the module of an id as the hub writes it, `owner/name@version`; verifiers imports the same one."""
    return environment_id.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def describe(taskset: vf.Taskset) -> dict[str, Any]:
    """Return the weights of its rewards by name (metrics have weight 0), and whether it has tools, and a state.

    Raises:
        ValueError: it needs what only a harness or a runtime of verifiers has; a line with the reason.
    """
    task = taskset.task_type()(None, taskset.config.task)
    toolsets = toolsets_of(taskset, task)
    if reason := _why_not_task(task) or next(filter(None, map(_why_not_tools, toolsets)), None):
        raise ValueError(reason)
    return {
        "rewards": {name: weight for name, (_, weight) in rewards_of(task).items()},
        "tools": bool(toolsets),
        "state": state_cls(type(task)) is not vf.State,
    }


def _why_not_task(task: vf.Task) -> str | None:
    """Return why the trainer cannot run tasks of a kind; None if it can."""
    kind = type(task)
    if kind.NEEDS_CONTAINER:
        return f"{kind.__name__} needs a container"
    for mark, reason in NOT_TAKEN.items():
        if marked := discover_decorated(task, mark) or (mark == "stop" and task.hooks(mark)):
            return f"{kind.__name__}.{marked[0].__name__} {reason}"
    hooks = [getattr(task, name) for name in HOOKS if getattr(kind, name) is not getattr(vf.Task, name)]
    for function in [*hooks, *(function for function, _ in rewards_of(task).values())]:
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is runtime.empty:
            return f"{kind.__name__}.{function.__name__} needs a runtime: a container or a sandbox"
    for judge in task.plugged_judges():
        if not os.environ.get(judge.config.api_key_var):
            return f"its judge {judge.reward_name} needs an API key in the environment: {judge.config.api_key_var}"
    return None


def _why_not_tools(toolset: vf.Toolset) -> str | None:
    """Return why the policy cannot call the tools of a toolset here; None if it can."""
    name, config = type(toolset).__name__, toolset.config
    if config.url or config.runtime.type != "subprocess":
        return f"{name} runs elsewhere: only tools that run on this machine are taken"
    if type(toolset).register is not vf.Toolset.register:
        return f"{name} registers its tools by itself; only methods with @vf.tool are taken"
    return None


def rewards_of(task: vf.Task) -> dict[str, tuple[Callable[..., Any], float]]:
    """Return the rewards of a task, its judges and its metrics by name, each with its weight; metrics have 0."""
    rewards = {function.__name__: (function, getattr(function, "_vf_weight", 1.0)) for function in task.hooks("reward")}
    rewards |= {judge.reward_name: (judge.score, judge.config.weight) for judge in task.plugged_judges()}
    return rewards | {function.__name__: (function, 0.0) for function in task.hooks("metric")}


def toolsets_of(taskset: vf.Taskset, task: vf.Task) -> list[vf.Toolset]:
    """Return new toolsets: those of the taskset, and those of a task."""
    return [*taskset.toolsets(taskset.config), *task.toolsets(task.config)]


def rows(taskset: vf.Taskset, first: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows of tasks: the messages of the `prompt`, and the data of the task for rewards and tools.

    Raises:
        ValueError: a task has no prompt, or needs more than text and a taskset's tools.
    """
    for task in islice(taskset, first, first + count):
        data = task.data
        if data.prompt is None or data.image:
            needs = "a container" if data.image else "a user who opens the conversation"
            raise ValueError(f"task {data.idx} needs {needs}")
        system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
        asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
        messages = [*system, *(message.model_dump(include={"role", "content"}) for message in asked)]
        if not all(isinstance(message["content"], str) for message in messages):
            raise ValueError(f"task {data.idx} has images or tool calls in its prompt; only text is taken")
        yield {"prompt": messages, COLUMN: data.model_dump_json(exclude_none=True)}


def task_of(taskset: vf.Taskset, data: str) -> vf.Task:
    """Return the task of a row."""
    kind = taskset.task_type()
    return kind(kind.data_type().model_validate_json(data), taskset.config.task)


async def reward(
    name: str,
    environment_id: str,
    environment_args: dict[str, Any],
    prompts: list[list[dict[str, Any]]],
    completions: list[list[dict[str, Any]]],
    verifiers_task: list[str],
) -> list[float]:
    """Return a reward, a judge or a metric of a taskset for each completion; of keyed scores their sum.

    Args:
        name: of the reward.
        environment_id: installed package or file of the taskset.
        environment_args: configuration of the taskset.
        prompts: conversations.
        completions: the messages that follow them.
        verifiers_task: data of the tasks, JSON.
    """
    states = [None] * len(prompts)
    rows = zip(prompts, completions, verifiers_task, states, strict=True)
    return await _scored_all(name, load_taskset(environment_id, environment_args), rows)


async def reward_of_state(
    name: str,
    environment_id: str,
    environment_args: dict[str, Any],
    prompts: list[list[dict[str, Any]]],
    completions: list[list[dict[str, Any]]],
    verifiers_task: list[str],
    environments: list[Any],
) -> list[float]:
    """Return the same, with the state that the tools of each episode have left."""
    states = [episode.state for episode in environments]
    rows = zip(prompts, completions, verifiers_task, states, strict=True)
    return await _scored_all(name, load_taskset(environment_id, environment_args), rows)


async def _scored_all(name: str, taskset: vf.Taskset, rows: Iterable[tuple[Any, Any, str, str | None]]) -> list[float]:
    return [
        await _scored(task_of(taskset, data), name, [*prompt, *messages], len(prompt), state)
        for prompt, messages, data, state in rows
    ]


async def _scored(
    task: vf.Task, name: str, messages: list[dict[str, Any]], sampled_from: int, state: str | None
) -> float:
    trace = trace_of(task, messages, sampled_from)
    if state is None:
        await invoke(task.setup, {"trace": trace, "runtime": None})
    else:
        trace.state = type(trace.state).model_validate_json(state)
    await invoke(task.finalize, {"trace": trace, "runtime": None})
    function, _ = rewards_of(task)[name]
    result = await invoke(function, {"task": task.data, "trace": trace})
    return float(sum(result.values()) if isinstance(result, dict) else result)


def trace_of(task: vf.Task, messages: list[dict[str, Any]], sampled_from: int) -> vf.Trace:
    """Return the trace of a conversation whose assistant messages from an index on are the policy's."""
    typed = typed_messages(messages)
    nodes = [
        vf.MessageNode(
            parent=index - 1 if index else None,
            message=message,
            sampled=index >= sampled_from and isinstance(message, vf.AssistantMessage),
        )
        for index, message in enumerate(typed)
    ]
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig(runtime=vf.SubprocessConfig())),
        state=state_cls(type(task))(),
        nodes=nodes,
        is_completed=True,
        ok=True,
    )


def typed_messages(messages: list[dict[str, Any]]) -> list[vf.Message]:
    """Return TRL's messages as those of verifiers; results of tools get the numbers of their calls, in order."""
    typed: list[vf.Message] = []
    open_calls: list[str] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "system":
            typed.append(vf.SystemMessage(content=content))
        elif role == "tool":
            number = open_calls.pop(0) if open_calls else "call_0"
            typed.append(vf.ToolMessage(tool_call_id=number, content=str(content), name=message.get("name")))
        elif role == "assistant":
            calls = [_call(call, f"call_{len(typed)}_{n}") for n, call in enumerate(message.get("tool_calls") or [])]
            open_calls = [call.id for call in calls]
            typed.append(vf.AssistantMessage(content=content, tool_calls=calls or None))
        else:
            typed.append(vf.UserMessage(content=content))
    return typed


def _call(call: dict[str, Any], number: str) -> vf.ToolCall:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return vf.ToolCall(id=number, name=str(function.get("name")), arguments=text)


class Episode:
    """The tools of an episode, and their state; subclasses have a method per tool."""

    def __init__(self, taskset: vf.Taskset) -> None:
        self._taskset = taskset
        self._servers: list[MCPServer] = []
        self.state = ""
        """The state of the episode, JSON; for rewards."""

    async def reset(self, verifiers_task: str, **columns: Any) -> None:
        """Begin the episode of a row."""
        task = task_of(self._taskset, verifiers_task)
        trace = trace_of(task, [], 0)
        await invoke(task.setup, {"trace": trace, "runtime": None})
        self._state, self._servers = trace.state, []
        for toolset in toolsets_of(self._taskset, task):
            toolset._pull_state, toolset._push_state = self._pulled, self._pushed  # by HTTP in verifiers
            await toolset.setup()
            await toolset.setup_task(task.data)
            server = MCPServer(toolset.server_name or type(toolset).__name__)
            toolset.register(server)
            self._servers.append(server)
        self.state = self._state.model_dump_json()

    async def _pulled(self) -> vf.State:
        return self._state

    async def _pushed(self, before: bytes) -> None:
        self.state = self._state.model_dump_json()

    async def _call(self, server: int, tool: str, arguments: dict[str, Any]) -> str:
        result = await self._servers[server].call_tool(tool, arguments)
        return "\n".join(block.text if block.type == "text" else str(block) for block in result.content)


def environment(environment_id: str, **environment_args: Any) -> Episode:
    """Return the environment of a taskset's tools, as `task.environment` takes it.

    Raises:
        ValueError: two tools have the same name.
    """
    taskset = load_taskset(environment_id, environment_args)
    methods: dict[str, Callable[..., Any]] = {}
    for number, toolset in enumerate(toolsets_of(taskset, taskset.task_type()(None, taskset.config.task))):
        for function in discover_decorated(toolset, "tool"):
            tool = getattr(function, "tool_name", None) or function.__name__
            shown = f"{toolset.server_name}_{tool}" if toolset.server_name else tool
            if shown in methods:
                raise ValueError(f"two tools are named {shown}")
            methods[shown] = _method(number, tool, shown, function)
    return type(Path(environment_id).stem, (Episode,), methods)(taskset)


def _method(server: int, tool: str, shown: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a tool, with its name, docstring and signature."""

    async def method(self: Episode, **arguments: Any) -> str:
        return await self._call(server, tool, arguments)

    signature = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__ = shown
    method.__doc__ = _documented(tool, function, list(signature.parameters))
    method.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    method.__annotations__ = {**get_type_hints(function), "return": str}
    return method


def _documented(tool: str, function: Callable[..., Any], parameters: list[str]) -> str:
    """Return a docstring that describes each parameter, as chat templates need it: verifiers needs no descriptions."""
    text = inspect.getdoc(function) or tool
    if not parameters or "Args:" in text:
        return text
    return "\n".join([text, "", "Args:", *(f"    {name}: {name}" for name in parameters)])
