"""Prompts of questions, built as a run builds its own."""

from typing import Any

from grpo.data.prompts import columns_of, prompts_from, template_of
from grpo.rundir.run_dir import Run
from grpo.utils.errors import ConfigError


def prompt_of(question: str, run: Run) -> Any:
    """Return the prompt for a question, built as in the run; ConfigError if that takes several columns."""
    if run.config.task.get("tasks"):
        raise ConfigError(
            f"{run.folder}: a run of several tasks, each with its own prompt; chat needs a run with one task"
        )
    prompt = run.config.task.prompt
    columns = [prompt] if prompt.isidentifier() else columns_of(template_of(run.config.task, ()), ())
    if len(set(columns)) != 1:
        raise ConfigError(f"task.prompt={prompt!r} is built from {len(columns)} columns, not from a question")
    return prompts_from(run.config.task, columns)({columns[0]: question})
