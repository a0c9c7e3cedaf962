"""Checks of tools and environments, and which processes generate together. No heavy imports."""

import math
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.batch import processes
from grpo.config.devices import may_sleep
from grpo.config.facts import WEIGHTS_DIVIDED, generator_of, sharding_strategy
from grpo.config.mixture import single_tasks, uses_tools, where
from grpo.utils.errors import ConfigError

TASKSET = "grpo.extras.environments.taskset.rows"
"""The generator of the problems of a taskset of verifiers."""


def is_taskset(task: DictConfig) -> bool:
    """Return whether a task is a taskset of verifiers, which brings its rewards and tools."""
    return task.dataset.get("generator") == TASKSET


def environment_args(task: DictConfig, place: str = "task") -> dict[str, Any]:
    """Return the keyword arguments of a task's environment; ConfigError if they are no mapping."""
    arguments = task.environment_args
    if not isinstance(arguments, DictConfig | None):
        raise ConfigError(f'{place}.environment_args={arguments}: a mapping, "{{name: value}}"')
    return OmegaConf.to_container(arguments, resolve=True) if arguments else {}  # type: ignore[return-value]


def check_environment(task: DictConfig, place: str) -> None:
    """Check the arguments of an environment, which is at this place in the configuration."""
    arguments = environment_args(task, place)
    if (arguments or task.environment_id is not None) and not (task.environment or is_taskset(task)):
        key = "environment_args" if arguments else "environment_id"
        raise ConfigError(f"{place}.{key}={task[key]}: there is no {place}.environment that takes it")


def check_tools(config: DictConfig) -> None:
    """Check the keys of tools and environment."""
    task = config.task
    for name, single in single_tasks(task).items():
        check_environment(single, where(name))
    if not uses_tools(task):
        return
    key = "tools" if task.tools else "environment"
    if not task.conversational:
        raise ConfigError(f"task.{key}: tools are called in conversations: task.conversational=true")
    if not 0 < task.tool_timeout < math.inf:
        raise ConfigError(f"task.tool_timeout={task.tool_timeout:g}: a positive number of seconds")
    turns = config.train.max_tool_calling_iterations
    if turns is not None and turns < 1:
        raise ConfigError(f"train.max_tool_calling_iterations={turns}: at least 1, or null for any number")
    if processes(config) > 1 and (together := generates_together(config.train)):
        raise ConfigError(
            f"task.{key}: with {together} all processes generate each turn together, and in TRL they have different "
            "numbers of turns: use one process, generation=vllm_colocate train.vllm_enable_sleep_mode=false, or "
            "shard=none or zero2"
        )


def generates_together(train: DictConfig) -> str | None:
    """Return the reason why several processes generate together; None if each process generates by itself."""
    generator, sharding = generator_of(train), sharding_strategy(train)
    divided = sharding if sharding in WEIGHTS_DIVIDED else None
    if generator == "server":
        return "a vLLM server"
    if generator == "colocated" and train.vllm_tensor_parallel_size > 1:
        return f"train.vllm_tensor_parallel_size={train.vllm_tensor_parallel_size}"
    if generator == "colocated":  # an engine that sleeps after each turn gets the weights again, gathered from all
        return f"train.vllm_enable_sleep_mode=true and {divided}" if train.vllm_enable_sleep_mode and divided else None
    return divided


def keeps_engine_awake(config: DictConfig) -> bool:
    """Whether the plan must not let a colocated engine sleep; see `generates_together` and `may_sleep`."""
    if not may_sleep(config):
        return True
    return uses_tools(config.task) and processes(config) > 1 and sharding_strategy(config.train) in WEIGHTS_DIVIDED
