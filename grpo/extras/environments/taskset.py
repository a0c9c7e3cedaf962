"""Tasksets of verifiers as a run takes them: `task=verifiers task.environment_id=…`. Other processes load them."""

import subprocess
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from grpo.config.tools import environment_args, is_taskset
from grpo.utils.errors import ConfigError
from rewards.isolation.process import Process

COLUMN = "verifiers_task"
"""Column with the data of a task, JSON."""
MODULE = "grpo.extras.environments.verifiers"
FIRST = "first"
"""The value of `task.eval.reward` that stands for the first reward of the taskset."""
OWN_REWARD: dict[str, Any] = {"timeout": 60, "on_error": "skip"}


def with_taskset(config: DictConfig, overrides: list[str]) -> tuple[DictConfig, list[str]]:
    """Return a configuration and its overrides with the rewards and the tools of its taskset, if it has one.

    A reward that is configured by the name of one of the taskset's takes precedence, key by key.

    Raises:
        ConfigError: the taskset cannot be loaded, or needs what a run does not have.
    """
    task = config.task
    if not is_taskset(task):
        return config, overrides
    if not task.environment_id:
        raise ConfigError("task.environment_id: the installed taskset of verifiers, or path/to/file.py")
    taskset = {"environment_id": task.environment_id, "environment_args": environment_args(task)}
    description = asked(**taskset)
    function = "reward_of_state" if description["tools"] and description["state"] else "reward"
    config = config.copy()
    with open_dict(config.reward):
        for name, weight in description["rewards"].items():
            reward = {"fn": f"{MODULE}.{function}", "weight": weight, "kwargs": {"name": name, **taskset}}
            config.reward[name] = OmegaConf.merge(OWN_REWARD | reward, config.reward.get(name, {}))
    if task.eval.reward == FIRST and function == "reward":
        config.task.eval.reward = next(iter(description["rewards"]), FIRST)
    elif task.eval.reward == FIRST:  # an evaluation has no episodes whose state a reward could read
        config.task.eval.size = 0
    if not description["tools"]:
        return config, overrides
    config.task.environment = f"{MODULE}.environment"
    return config, [*overrides, f"task.environment={MODULE}.environment"]


def rows(
    split: str, size: int, held_out: int, environment_id: str, environment_args: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Return rows of a taskset: of the split `test` its first `held_out` tasks at most, of `train` those after them.

    Raises:
        ConfigError: the taskset cannot be loaded, or has such a task.
    """
    first, count = (0, min(size, held_out)) if split == "test" else (held_out, size)
    return asked(environment_id, environment_args or {}, first, count)["rows"]


def asked(environment_id: str, environment_args: dict[str, Any], first: int = 0, count: int = 0) -> dict[str, Any]:
    """Return what a process of its own says of a taskset: its `rewards`, `tools`, `state`, and some of its `rows`.

    Raises:
        ConfigError: the taskset cannot be loaded; a line with the reason.
    """
    named = (environment_id, environment_args, first, count)
    try:
        process = Process("grpo.extras.environments.worker", named, "loading it", subprocess.DEVNULL)
    except ValueError as error:
        raise ConfigError(f"task.environment_id={environment_id}: {error}") from error
    process.stop()
    return process.loaded
