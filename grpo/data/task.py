"""From `conf/task` to data sets with the columns `prompt`, `answer` and all other columns of the source."""

import copy
import importlib
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset
from omegaconf import DictConfig

from grpo.config.data_files import arguments_of, broken_line, from_file, in_one_line
from grpo.config.library import BUILDERS
from grpo.data import images
from grpo.data.answers import answer_text, final
from grpo.data.prompts import column_of, columns_of, prompts_from, template_of
from grpo.utils.errors import ConfigError
from grpo.view.images import COLUMN, View, names, template_errors
from grpo.view.stream import Stream
from rewards.isolation.extras import not_installed
from rewards.isolation.loader import FROM_TRL
from rewards.notation import numbers

log = logging.getLogger(__name__)
FILTERED = {
    "no_question": "without a value that task.prompt names",
    "no_answer": "without an answer",
    "unread_answer": "whose answer task.answer.pattern does not find",
    "too_long": "with a prompt longer than task.max_prompt_length",
    "held_out": "that are among the held-out ones",
}


@dataclass
class Problems:
    """The training problems and the held-out problems."""

    train: Dataset
    """Columns `prompt` (a string, or a list of messages), `answer` (a string), and those of the source. Of a stream
    the first problem alone."""
    held_out: Dataset | None
    """The same columns; None if `task.eval.size` is 0."""
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    """For `train` and `held_out`, of a mixture also for `<task>/train` and `<task>/held_out`: rows read, used, filtered
    by reason, and with answers that are not numbers."""
    view: View | None = None
    """Resizing and tokens of images; None without images."""
    stream: Stream | None = None
    """The training problems, where they are read while the run trains."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """Columns that the rewards of each task of a mixture can use."""

    @property
    def most_images(self) -> int | None:
        """Images in the prompt with the most of them; None if no prompt has any, or if a stream may have more."""
        if self.view is None or self.stream:
            return None
        splits = [self.train, *([self.held_out] if self.held_out else [])]
        return max(len(sizes) for split in splits for sizes in split.with_format(None)["shown_sizes"]) or None

    def __str__(self) -> str:
        lines = []
        for split, count in self.counts.items():
            out = ", ".join(f"{count[why]} {words}" for why, words in FILTERED.items() if count[why])
            name, _, which = split.rpartition("/")
            words = ("to train on" if which == "train" else "held out") + (f" in {name}" if name else "")
            if split == "train" and self.stream:
                words = f"in the first {count['rows']:,} rows of a stream to train on"
            odd = f"; {count['not_a_number']} answers are not numbers" if count["not_a_number"] else ""
            lines.append(f"{count['used']} problems {words}{f' (filtered: {out})' if out else ''}{odd}")
        return "\n".join(lines)


def load_task(
    task: DictConfig, processing_class: Any = None, tools: Sequence[Any] = (), seed: int | None = None
) -> Problems:
    """Load the training problems and the held-out problems, and filter unusable rows.

    A tokenizer or processor measures the prompts; without it no prompt is too long or has images. `seed` shuffles the
    problems of a stream, buffer by buffer; the trainer shuffles others.

    Raises:
        ConfigError: a file, a split, a column or every row is missing.
    """
    if task.dataset.get("streaming"):
        return _stream(task, processing_class, tools, seed)
    train, counts = _prepare(load_split(task, task.split), task, processing_class, task.split, tools)
    view = images.view_of(task, processing_class) if processing_class else None
    problems = Problems(train, None, {"train": counts}, view)
    if task.eval.size:
        problems.held_out, problems.counts["held_out"] = load_held_out(task, processing_class, tools)
        drop_held_out(problems, [problems.held_out])
    for split, count in problems.counts.items():
        count_used(split, count)
    return problems


def drop_held_out(problems: Problems, held_out: Sequence[Dataset]) -> None:
    """Filter the training problems that are among those held out, and count."""
    known = {question for each in held_out for question in _questions(each)}
    new = [question not in known for question in _questions(problems.train)]
    problems.train = _keep(problems.train, new, problems.counts["train"], "held_out")


def _stream(task: DictConfig, processing_class: Any, tools: Sequence[Any], seed: int | None) -> Problems:
    """Return the training problems as a stream, behind those of its first rows that are held out."""
    view = images.view_of(task, processing_class) if processing_class else None
    held_out, counts = load_held_out(task, processing_class, tools) if task.eval.size else (None, {})
    known = set(_questions(held_out)) if held_out else set()
    if held_out:
        count_used("held_out", counts)
    thread_copy = copy.deepcopy(processing_class)  # a tokenizer does not serve two threads

    def prepare(rows: Dataset, first: int) -> tuple[Dataset, dict[str, int]]:
        prepared, counts = _prepare(rows, task, thread_copy, f"{task.split}[{first}:]", tools)
        prepared = _keep(prepared, [question not in known for question in _questions(prepared)], counts, "held_out")
        return prepared.with_format(None), counts | {"used": len(prepared)}

    skip = task.eval.size if task.eval.split == task.split else 0
    source, where = _source(task, task.split), f"task.dataset={in_one_line(arguments_of(task))}, split {task.split}"
    stream = Stream(source, prepare, task.buffer_size, seed, where, skip)
    every = {"train": stream.counts} | ({"held_out": counts} if held_out else {})
    return Problems(stream.beginning(1), held_out, every, view, stream)


def count_used(split: str, count: dict[str, int]) -> None:
    """Add how many rows are used; ConfigError if none is."""
    count["used"] = count["rows"] - sum(count[why] for why in FILTERED)
    if not count["used"]:
        why = max(FILTERED, key=lambda why: count[why])
        raise ConfigError(f"task: nothing left of {split}: {count[why]} of {count['rows']} rows {FILTERED[why]}")
    log.info("%s: %s", split, count)


def load_held_out(
    task: DictConfig, processing_class: Any = None, tools: Sequence[Any] = ()
) -> tuple[Dataset, dict[str, int]]:
    """Load the problems to evaluate on, filtered as those to train on are, and the counts of them."""
    rows = load_split(task, task.eval.split, task.eval.size)
    return _prepare(rows, task, processing_class, task.eval.split, tools)


def prompt_lengths(prompts: list[Any], processing_class: Any, tools: Sequence[Any] = ()) -> list[int]:
    """Return how many tokens each prompt has, with the chat template and the tools in it if it is conversational."""
    if not prompts:
        return []
    plain = isinstance(prompts[0], str)
    if not plain and not processing_class.chat_template:
        raise ConfigError("task.conversational: the model has no chat template; use task.conversational=false")
    if not plain:
        with template_errors():
            prompts = processing_class.apply_chat_template(
                prompts, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
            )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return [len(ids) for ids in tokenizer(prompts, add_special_tokens=plain)["input_ids"]]


def reward_columns(problems: Dataset) -> list[str]:
    """Return the columns that reward functions get: all but images, which stay in the trainer's process."""
    return [name for name in problems.column_names if name != COLUMN]


def _questions(problems: Dataset) -> list[tuple[str, ...]]:
    """Return the identity of a problem: the words of its question, and its images."""
    problems = problems.with_format(None)  # which opens no images
    texts = [prompt if isinstance(prompt, str) else prompt[-1]["content"] for prompt in problems["prompt"][:]]
    words = [" ".join(text.split()).casefold() for text in texts]
    shown = names(problems) if COLUMN in problems.column_names else [()] * len(words)
    return [(text, *names) for text, names in zip(words, shown, strict=True)]


def _keep(dataset: Dataset, keep: list[bool], counts: dict[str, int], why: str) -> Dataset:
    counts[why] += len(keep) - sum(keep)
    return dataset if all(keep) else dataset.select([row for row, is_kept in enumerate(keep) if is_kept])


def load_split(task: DictConfig, split: str, limit: int | None = None) -> Dataset:
    """Load a split unchanged, or its first rows: from a generator, a file, or with `datasets.load_dataset`."""
    dataset = _source(task, split, limit)
    if isinstance(dataset, IterableDataset):
        with _in_one_line(task, split):
            dataset = Dataset.from_list(list(dataset if limit is None else dataset.take(limit)), dataset.features)
    if len(dataset) == 0:
        raise ConfigError(f"task.dataset={in_one_line(arguments_of(task))}, split {split}: there are no rows in it")
    return dataset if limit is None else dataset.select(range(min(limit, len(dataset))))


def _source(task: DictConfig, split: str, limit: int | None = None) -> Any:
    """Return a split as `datasets` has it, a stream as an `IterableDataset`; a generator makes `limit` rows at most."""
    arguments, streaming = arguments_of(task), bool(task.dataset.get("streaming"))
    generator = arguments.pop("generator", None)
    if generator and limit is not None and "size" in arguments:
        arguments["size"] = min(arguments["size"], limit)
    with _in_one_line(task, split):
        if not generator:
            try:
                dataset = load_dataset(**from_file(arguments), split=split)
            except StopIteration:  # what `datasets` makes of an empty file
                raise ValueError("there are no rows in it") from None
            shown = task.images if streaming and dataset.features and task.images in dataset.features else None
            return images.undecoded(dataset, shown) if shown else dataset
        module, _, function = generator.rpartition(".")
        arguments.pop("streaming", None)
        rows = partial(getattr(importlib.import_module(module), function), split=split, **arguments)
        return IterableDataset.from_generator(rows) if streaming else Dataset.from_list(rows())


@contextmanager
def _in_one_line(task: DictConfig, split: str) -> Iterator[None]:
    """Raise a ConfigError for whatever goes wrong inside, while a split is read."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        missing = not_installed(cause.name) if isinstance(cause, ModuleNotFoundError) else None
        reason = missing or " ".join(str(cause).split()) or type(error).__name__
        if "Unknown split" in reason:
            reason += " Parts of one split are \"task.split='train[200:]'\" \"task.eval.split='train[:200]'\""
        if "JSON parse error" in reason:
            reason += f" ({place})" if (place := broken_line(arguments_of(task))) else ""
        if "infer the same data file format" in reason or "No (supported) data files" in reason:
            reason = f"a folder without a kind of files that it shows; name the file, one of {', '.join(BUILDERS)}"
        if "Repo id must" in reason:
            reason = "neither a file nor a folder, and no name of a data set on the hub"
        if "corresponds to no data" in reason and "[" in split:
            reason = "no data in this part, as there are too few rows; a split like train[:80%] is a part of any number"
        raise ConfigError(f"task.dataset={in_one_line(arguments_of(task))}, split {split}: {reason}") from error


def _prepare(
    dataset: Dataset, task: DictConfig, processing_class: Any, split: str, tools: Sequence[Any]
) -> tuple[Dataset, dict[str, int]]:
    """Add prompts, answers and images, filter rows that would spoil the training, and count."""
    view = images.view_of(task, processing_class) if processing_class else None
    if view:
        dataset = images.with_sizes(dataset, task, view, split)
    dataset, counts = _with_prompts(dataset, task)
    if processing_class is not None:
        if view:
            lengths = images.prompt_lengths(dataset, view, task.max_prompt_length, split, tools)
        else:
            lengths = prompt_lengths(dataset["prompt"][:], processing_class, tools)  # [:] reads a column at once
        limit = task.max_prompt_length
        dataset = _keep(dataset, [length <= limit for length in lengths], counts, "too_long")
    return dataset.with_transform(view) if view else dataset, counts


def _with_prompts(dataset: Dataset, task: DictConfig) -> tuple[Dataset, dict[str, int]]:
    """Add the prompts and the answers, filter rows without a question or an answer, and count."""
    _check_columns(dataset, task)
    counts = {"rows": len(dataset), "used": 0, **dict.fromkeys(FILTERED, 0), "not_a_number": 0}
    make_prompt = prompts_from(task, dataset.column_names)
    column, pattern = task.answer.column, task.answer.pattern
    prompts: list[Any] = []
    texts: list[str] = []
    try:
        for row in dataset.remove_columns(COLUMN) if task.images else dataset:
            prompts.append(make_prompt(row))
            texts.append("" if column is None else answer_text(row, column))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"task.dataset={in_one_line(arguments_of(task))}: not UTF-8, {error}; save the file as UTF-8"
        ) from error
    keep = [prompt is not None for prompt in prompts]
    dataset = _keep(dataset, keep, counts, "no_question")
    texts = [text for text, is_kept in zip(texts, keep, strict=True) if is_kept]
    columns = {
        "prompt": [prompt for prompt in prompts if prompt is not None],
        "answer": [final(text, pattern) for text in texts],
    }
    # added anew: `map` would give an answer the type that its column has in the file, such as a number
    others = [name for name in dataset.column_names if name not in columns]
    prepared = dataset.select_columns(others) if others else Dataset.from_dict(columns)
    for name, values in columns.items() if others else ():
        prepared = prepared.add_column(name, values)
    prepared = prepared.select_columns(list(dict.fromkeys([*dataset.column_names, *columns])))
    if column is None:
        return prepared, counts
    prepared = _keep(prepared, [text.strip() != "" for text in texts], counts, "no_answer")
    prepared = _keep(prepared, [answer != "" for answer in prepared["answer"][:]], counts, "unread_answer")
    counts["not_a_number"] = sum(not numbers(answer) for answer in prepared["answer"][:])
    return prepared, counts


def _check_columns(dataset: Dataset, task: DictConfig) -> None:
    names = dataset.column_names
    template = template_of(task, names)
    try:
        wanted = columns_of(template, names)
        groups = re.compile(task.answer.pattern or "()").groups
    except (ValueError, re.error) as error:
        raise ConfigError(f"task.prompt or task.answer.pattern: {error}; braces that are text are doubled") from error
    if groups == 0:
        raise ConfigError(f"task.answer.pattern={task.answer.pattern}: put the final answer in parentheses")
    for name in ("self", *FROM_TRL):
        if name in names:
            raise ConfigError(f"task: a column is named {name}, as an argument of reward functions is: rename it")
    for name in ("image", "images"):
        if name in names and task.images is None:
            raise ConfigError(
                f"task: TRL shows a column that is named {name} to the policy: set task.images, or rename it"
            )
    answer = None if task.answer.column is None else column_of(task.answer.column, names)
    named = [(answer, "task.answer.column"), *((name, "task.prompt") for name in wanted)]
    named.append((task.eval.difficulty, "task.eval.difficulty"))
    if missing := [f"{name} ({key})" for name, key in named if name is not None and name not in names]:
        raise ConfigError(f"task: the data has no column {', '.join(missing)}; it has: {', '.join(names)}")
    if not wanted and answer and not task.images:
        raise ConfigError(
            f"task.prompt={task.prompt!r}: it names no column, so that all rows have the same prompt; write columns in "
            f"braces, as in {{{names[0]}}}; the data has: {', '.join(names)}"
        )
