"""Checks of a mixture of tasks, with one-line errors. No heavy imports."""

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.data_files import arguments_of
from grpo.config.messages import meant
from grpo.config.mixture import scored_by, uses_tools
from grpo.config.schema import REWARD_MODEL, ROOT
from grpo.config.tools import is_taskset
from grpo.utils.errors import ConfigError


def check_mixture(config: DictConfig) -> None:
    """Check the tasks of a mixture, their weights, and that nothing is set that only a task of its own would use.

    Raises:
        ConfigError: the first problem.
    """
    task = config.task
    if not task.tasks and not arguments_of(task):
        raise ConfigError("task.tasks: there is no task in it; name some, +task@task.tasks.sums=sums")
    if not task.tasks:
        return
    if arguments_of(task):
        raise ConfigError("task.tasks: several tasks need task=mixture; each of them has its own data")
    check_derived(config)
    check_weights({str(name): mixed.weight for name, mixed in task.tasks.items()})
    check_mixed_rewards(config)
    for name in task.tasks:
        check_task(str(name), config)
    check_common(config)


def check_task(name: str, config: DictConfig) -> None:
    """Check a task of a mixture: its data, limit and grader."""
    mixed, place = config.task.tasks[name], f"task.tasks.{name}"
    if not arguments_of(mixed.task):
        raise ConfigError(f"{place}: no data; +task@{place}=… names a file of conf/task")
    if is_taskset(mixed.task):
        raise ConfigError(f"{place}: a taskset of verifiers is a task alone, as its rewards are those of the run")
    if mixed.task.dataset.get("streaming"):
        raise ConfigError(f"{place}.task.dataset.streaming=true: a mixture reads its data whole; leave it out")
    if mixed.task.images:
        raise ConfigError(f"{place}.task.images={mixed.task.images}: a mixture takes text alone")
    length, grader = mixed.train.max_completion_length, mixed.task.eval.reward
    if length is not None and length < 1:
        raise ConfigError(f"{place}.train.max_completion_length={length}: at least 1")
    if grader not in config.reward and not (ROOT / "conf" / "reward" / f"{grader}.yaml").is_file():
        raise ConfigError(f"{place}.task.eval.reward={grader}: neither a reward of this run nor one of conf/reward")


def check_common(config: DictConfig) -> None:
    """Check what TRL has once: prompts of a batch have one form, and all turns with tools have one limit."""
    tasks = config.task.tasks
    first, *others = map(str, tasks)
    for name, thinking in ((name, mixed.task.get("thinking")) for name, mixed in tasks.items()):
        if thinking not in (None, config.task.get("thinking")):
            raise ConfigError(f"task.tasks.{name}.task.thinking={thinking}: all tasks of a run have task.thinking=…")
    for name in others:
        value, known = (tasks[task].task.conversational for task in (name, first))
        if value != known:
            raise ConfigError(
                f"task.tasks.{name}.task.conversational={value}: {known} in task.tasks.{first}; TRL takes prompts of "
                "one form"
            )
    for name in (str(name) for name, mixed in tasks.items() if uses_tools(mixed.task)):
        for key in ("max_completion_length", "max_tool_calling_iterations"):
            limit, of_run = tasks[name].train[key], config.train[key]
            if limit not in (None, of_run):
                raise ConfigError(
                    f"task.tasks.{name}.train.{key}={limit}: all turns with tools have one limit, train.{key}={of_run}"
                )


def check_derived(config: DictConfig) -> None:
    """Check that `task` has nothing but what follows from the tasks, `thinking`, and `eval.size=0`."""
    shipped = OmegaConf.merge(
        OmegaConf.load(ROOT / "conf" / "task" / "mixture.yaml"), {"task": {"tasks": config.task.tasks}}
    )
    for key, value in leaves(config.task):
        expected = OmegaConf.select(shipped, f"task.{key}", default=default_of(config.task, key))
        if key.startswith("tasks.") or value == expected or key == "thinking" or (key, value) == ("eval.size", 0):
            continue
        raise ConfigError(f"task.{key}={value}: each task of a mixture has its own, task.tasks.NAME.task.{key}=…")


def leaves(node: DictConfig, before: str = "") -> list[tuple[str, Any]]:
    """Return the values of a configuration by their dotted keys; a mapping without a schema is a value."""
    values: list[tuple[str, Any]] = []
    for key in map(str, node):
        value = node[key]
        if isinstance(value, DictConfig) and OmegaConf.get_type(value) is not dict:
            values += leaves(value, f"{before}{key}.")
        elif f"{before}{key}" != "tasks":
            values.append((f"{before}{key}", value))
    return values


def default_of(task: DictConfig, key: str) -> Any:
    """Return the schema's default of a key of `task`."""
    return OmegaConf.select(OmegaConf.structured(OmegaConf.get_type(task)), key)


def check_weights(weights: Mapping[str, float]) -> None:
    """Check that weights are not negative, and not all zero."""
    for name, weight in weights.items():
        if not 0 <= weight < math.inf:
            raise ConfigError(f"task.tasks.{name}.weight={weight:g}: a number from 0 on is needed")
    if not any(weights.values()):
        raise ConfigError(f"task.tasks: the weights of {', '.join(weights)} are all 0, so that no problem is taken")


def check_mixed_rewards(config: DictConfig) -> None:
    """Check that the rewards that tasks name are in the run, and that each reward and each task has another."""
    rewards = [str(name) for name in config.reward]
    for name, mixed in config.task.tasks.items():
        for reward in mixed.rewards or []:
            if reward not in rewards:
                raise ConfigError(f"task.tasks.{name}.rewards: no reward {reward} in this run{meant(reward, rewards)}")
        if mixed.rewards is not None and not mixed.rewards and not config.task.environment:
            raise ConfigError(f"task.tasks.{name}.rewards=[]: a task needs at least one reward")
    for reward in rewards:
        scores = scored_by(config.task, reward)
        if config.reward[reward].get("fn") == REWARD_MODEL and len(scores) < len(config.task.tasks):
            raise ConfigError(f"reward.{reward}: a reward model scores all tasks; name it in each, or in none")
        if not scores:
            raise ConfigError(f"reward.{reward}: no task names it in task.tasks.NAME.rewards; leave it out")
