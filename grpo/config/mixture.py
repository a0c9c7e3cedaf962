"""Several tasks in a run, and what the whole run takes from them. No heavy imports."""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.options import Mixture

FROM_TASKS: dict[str, Callable[[list[Any]], Any]] = {
    "any": any,
    "first": lambda values: next((value for value in values if value is not None), None),
    "union": lambda values: list(dict.fromkeys(item for value in values for item in value)),
    "max": lambda values: max(value for value in [0, *values] if value is not None),
    "sum": sum,
    "names": lambda values: ", ".join(dict.fromkeys(values)),
}
"""How `${of_tasks:how,key,without}` makes the run's value of the values of the tasks."""


def register() -> None:
    """Register the resolver `${of_tasks:how,key,without}`, a value that follows from those of all tasks."""
    OmegaConf.register_new_resolver("of_tasks", of_tasks, replace=True)


def of_tasks(how: str, key: str, without: Any = None, *, _root_: DictConfig) -> Any:
    """Return what `FROM_TASKS` makes of the values of a key, such as `task.eval.size`, in all tasks of a mixture.

    `without` is the value without any task.
    """
    values = [OmegaConf.select(mixed, key) for mixed in _root_.task.tasks.values()]
    return FROM_TASKS[how](values) if values else without


def single_tasks(task: DictConfig) -> dict[str, DictConfig]:
    """Return the tasks of a run by their names; a run with one task has it under an empty name."""
    tasks = task.get("tasks") or {}  # runs of earlier versions lack it
    return {str(name): mixed.task for name, mixed in tasks.items()} or {"": task}


def generated(task: DictConfig) -> int | None:
    """Return how many problems the generators of a run make to train on; None if other data are loaded."""
    data = [single.dataset for single in single_tasks(task).values()]
    are_generated = all(rows.get("generator") and isinstance(rows.get("size"), int) for rows in data)
    return sum(rows.size for rows in data) if are_generated else None


def uses_tools(task: DictConfig) -> bool:
    """Return whether the policy may call anything in a task."""
    return bool(task.tools or task.environment)


def has_own_tools(task: DictConfig) -> bool:
    """Return whether the policy may not call the same in all tasks of a mixture."""
    keys = ("tools", "environment", "environment_id", "environment_args", "tool_timeout")
    return len({str([single[key] for key in keys]) for single in single_tasks(task).values()}) > 1


def where(name: str) -> str:
    """Return where the configuration has a task that `single_tasks` returns."""
    return f"task.tasks.{name}.task" if name else "task"


def scored_by(task: DictConfig, reward: str) -> list[str]:
    """Return the tasks of a mixture that a reward scores."""
    return [str(name) for name, mixed in task.tasks.items() if mixed.rewards is None or reward in mixed.rewards]


def graded_by(task: DictConfig, reward: str) -> list[str]:
    """Return the tasks of a mixture whose held-out problems a reward grades."""
    return [str(name) for name, mixed in task.tasks.items() if mixed.task.eval.reward == reward]


def mixture_of(task: DictConfig, train: DictConfig, reward: DictConfig) -> Mixture | None:
    """Return the mixture of a run as the trainer takes it; None for a run with one task."""
    if not task.tasks:
        return None
    return Mixture(
        {str(name): mixed.weight for name, mixed in task.tasks.items()},
        {str(name): limit_of(str(name), task, train) for name in task.tasks},
        {str(name): grader_among(str(name), task, reward) for name in task.tasks},
    )


def limit_of(name: str, task: DictConfig, train: DictConfig) -> int:
    """Return the tokens of the longest completion of a task that `single_tasks` returns."""
    limit = task.tasks[name].train.max_completion_length if name else None
    return min(limit or train.max_completion_length, train.max_completion_length)


def grader_among(name: str, task: DictConfig, reward: DictConfig) -> str | None:
    """Return the grader of a task of a mixture if it is a reward that scores the task."""
    grader, mixed = task.tasks[name].task.eval.reward, task.tasks[name]
    scores = mixed.rewards is None or grader in mixed.rewards
    return grader if grader in reward and scores else None
