"""From `conf/task` to data sets with the columns `prompt`, `answer` and whatever else the rewards may want."""

import importlib
import re
import string
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from omegaconf import DictConfig, OmegaConf

from grpo.config import ConfigError


def load_task(task: DictConfig) -> tuple[Dataset, Dataset | None]:
    """Return the problems to train on and the held-out ones (None if `task.eval.size` is 0).

    Both have a column `prompt` (a string, or a list of messages if the task is conversational) and a column `answer`
    (the reference's final answer, a string); the columns of the source stay.

    Raises:
        ConfigError: a file, a split, a column or every row is missing.
    """
    train = _prepare(load_split(task, task.split), task)
    if not task.eval.size:
        return train, None
    held_out = load_split(task, task.eval.split)
    return train, _prepare(held_out.select(range(min(task.eval.size, len(held_out)))), task)


def load_split(task: DictConfig, split: str) -> Dataset:
    """Load one split as it is, from the embedded generator or with `datasets.load_dataset`."""
    arguments: dict[str, Any] = OmegaConf.to_container(task.dataset, resolve=True)  # type: ignore[assignment]
    generator = arguments.pop("generator", None)
    try:
        if generator:
            module, _, function = generator.rpartition(".")
            dataset = Dataset.from_list(getattr(importlib.import_module(module), function)(split=split, **arguments))
        else:
            dataset = load_dataset(**arguments, split=split)
    except StopIteration:  # what `datasets` makes of an empty file
        raise ConfigError(f"task.dataset={_flat(arguments)}, split {split}: there are no rows in it") from None
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        if Path(str(arguments.get("path"))).suffix:
            reason += "; for a file: task.dataset.path=json task.dataset.name=null +task.dataset.data_files=…"
        raise ConfigError(f"task.dataset={_flat(arguments)}, split {split}: {reason}") from error
    if len(dataset) == 0:
        raise ConfigError(f"task.dataset={_flat(arguments)}, split {split}: there are no rows in it")
    return dataset


def _flat(arguments: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in arguments.items()) + "}"


def _prepare(dataset: Dataset, task: DictConfig) -> Dataset:
    columns = ", ".join(dataset.column_names)
    try:
        wanted = [task.answer.column, *(name for _, name, _, _ in string.Formatter().parse(task.prompt) if name)]
        groups = re.compile(task.answer.pattern or "()").groups
    except (ValueError, re.error) as error:
        raise ConfigError(f"task.prompt or task.answer.pattern: {error}") from error
    if groups == 0:
        raise ConfigError(f"task.answer.pattern={task.answer.pattern}: put the final answer in parentheses")
    for name in wanted:
        if name not in dataset.column_names:
            raise ConfigError(
                f"task: the data has no column {name}; it has: {columns}. task.prompt and task.answer.column name them"
            )
    prepared = dataset.map(lambda row: {"prompt": _prompt(row, task), "answer": _answer(row, task)})
    unread = sum(answer == "" for answer in prepared["answer"])
    if unread == len(prepared):
        raise ConfigError(f"task.answer.pattern={task.answer.pattern}: matches no row of column {task.answer.column}")
    return prepared.filter(lambda row: row["answer"] != "") if unread else prepared


def _prompt(row: dict[str, Any], task: DictConfig) -> str | list[dict[str, str]]:
    text = task.prompt.format(**row)
    if not task.conversational:
        return f"{task.system_prompt}\n\n{text}" if task.system_prompt else text
    system = [{"role": "system", "content": task.system_prompt}] if task.system_prompt else []
    return [*system, {"role": "user", "content": text}]


def _answer(row: dict[str, Any], task: DictConfig) -> str:
    text = str(row[task.answer.column])
    if task.answer.pattern is None:
        return text.strip()
    found = re.search(task.answer.pattern, text)
    return found.group(1).strip() if found else ""
