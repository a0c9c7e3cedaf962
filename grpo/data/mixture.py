"""The problems of several tasks as one data set, with the name of the task in a column."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from datasets import Dataset, Value, concatenate_datasets
from omegaconf import DictConfig, OmegaConf

from grpo.config.mixture import has_own_tools, single_tasks, where
from grpo.data.task import Problems, count_used, drop_held_out, load_task, reward_columns
from grpo.utils.errors import ConfigError

COLUMN = "task"
"""The column with the name of a problem's task, by which TRL's reward functions tell tasks apart, too."""
ENVIRONMENT = "environment"
"""The column by which TRL chooses among several environments."""
Described = Callable[[str], Sequence[Any]]


def no_tools(task: str) -> Sequence[Any]:
    """Return that the prompts of a task describe no tools."""
    return ()


def load_problems(
    task: DictConfig, processing_class: Any = None, tools: Described = no_tools, seed: int | None = None
) -> Problems:
    """Load the problems of a run, of one task or of the tasks of a mixture; see `load_task`.

    What a task of a mixture holds out, no task trains on. Columns that a task lacks are None. `Problems.columns` has
    those of each task.

    Args:
        tools: returns what the prompts of a task describe, from its name; the single task of a run has none.
        seed: as of `load_task`.

    Raises:
        ConfigError: the data of a task cannot be loaded, or a column has different types in two tasks.
    """
    if not task.tasks:
        return load_task(task, processing_class, tools(""), seed)
    tasks, own_tools = single_tasks(task), has_own_tools(task)
    loaded = {name: load_one(name, single, task, processing_class, tools(name)) for name, single in tasks.items()}
    tested = [of.held_out for of in loaded.values() if of.held_out is not None]
    for name, problems in loaded.items():
        drop_held_out(problems, tested)
        with named_errors(name):
            count_used("train", problems.counts["train"])
    train = {name: named(problems.train, name, own_tools) for name, problems in loaded.items()}
    held_out = {name: named(of.held_out, name, own_tools) for name, of in loaded.items() if of.held_out is not None}
    counts = {f"{name}/{split}": count for name, problems in loaded.items() for split, count in problems.counts.items()}
    for split in ("train", "held_out") if held_out else ("train",):
        total = sum((Counter(count) for key, count in counts.items() if key.endswith(f"/{split}")), Counter[str]())
        counts[split] = dict.fromkeys(next(iter(counts.values())), 0) | total
    columns = {name: usable(of, single_tasks(task)[name]) for name, of in train.items()}
    return Problems(joined(train), joined(held_out) if held_out else None, counts, columns=columns)


def load_one(name: str, single: DictConfig, task: DictConfig, processing_class: Any, tools: Sequence[Any]) -> Problems:
    """Load a task of a mixture; ConfigError that names it if that fails."""
    single = single.copy()
    OmegaConf.set_readonly(single, False)
    if not task.eval.size:
        single.eval.size = 0
    with named_errors(name):
        problems = load_task(single, processing_class, tools)
    for column in (COLUMN, *([ENVIRONMENT] if has_own_tools(task) else [])):
        if column in problems.train.column_names:
            raise ConfigError(
                f"{where(name)}: the data has a column {column}, which names the task in a mixture: rename it"
            )
    return problems


@contextmanager
def named_errors(task: str) -> Iterator[None]:
    """Name the task of a mixture in its errors."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where(task)}: {str(error).removeprefix('task: ').removeprefix('task.')}") from error


def named(problems: Dataset, name: str, own_tools: bool = False) -> Dataset:
    """Return problems with the name of their task, which is also that of its environment if it has tools of its own."""
    for column in (COLUMN, ENVIRONMENT)[: 1 + own_tools]:
        problems = problems.add_column(column, [name] * len(problems))
    return problems


def usable(problems: Dataset, task: DictConfig) -> list[str]:
    """Return the columns that rewards of a task can use: not an answer that the task has none of."""
    return [name for name in reward_columns(problems) if name != "answer" or task.answer.column is not None]


def joined(parts: Mapping[str, Dataset]) -> Dataset:
    """Return the problems of all tasks, one task after the other.

    Raises:
        ConfigError: a column has different types in two tasks.
    """
    known: dict[str, tuple[str, Any]] = {}
    for name, part in parts.items():
        for column, kind in part.features.items():
            first, other = known.setdefault(column, (name, kind))
            if other == Value("null"):
                known[column] = (name, kind)
            elif kind not in (other, Value("null")):
                raise ConfigError(
                    f"task.tasks: the column {column} is {text(kind)} in {name} and {text(other)} in {first}: rename "
                    "it in one of the files, or write values of one type"
                )
    return concatenate_datasets(list(parts.values()))


def text(kind: Any) -> str:
    """Return the type of a column in a few words."""
    return str(getattr(kind, "dtype", None) or type(kind).__name__)
