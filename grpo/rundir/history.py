"""The runs in this folder: which tasks they had, and which of them was started last."""

import contextlib
import json
from pathlib import Path

from omegaconf import DictConfig

from grpo.config.mixture import single_tasks
from grpo.utils.errors import ConfigError
from rewards.probing import runs


def name_of(task: DictConfig) -> str:
    """Return a name of a task, or of the tasks of a mixture: the names of their data."""
    names = [
        " ".join(str(single.dataset[key]) for key in ("generator", "path", "name") if single.dataset.get(key))
        for single in single_tasks(task).values()
    ]
    return " + ".join(names)


def has_been_run(task: str, run_dir: Path) -> bool:
    """Return whether a run or a forecast of a task is in this folder, or in a run's directory.

    It searches files as text, so that a malformed file, or one of somebody else, cannot end the run.
    """
    entry = json.dumps({"task": task})[1:-1]
    folders = [run_dir, *(folder for place in runs.PLACES for folder in Path().glob(place))]
    for file in (folder / name for folder in folders for name in ("summary.json", "preflight.json")):
        with contextlib.suppress(OSError):
            if entry in file.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def named_run(word: str, besides: str | None = None) -> Path:
    """Return `rewards.probing.runs.named_run`, or raise a ConfigError if there is no run."""
    try:
        return runs.named_run(word, besides)
    except ValueError as error:
        raise ConfigError(str(error)) from error
