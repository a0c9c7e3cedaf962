"""The runs in this folder: which tasks they had, and which of them was started last."""

import contextlib
import json
import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from grpo.config.mixture import single_tasks
from grpo.utils.errors import ConfigError

PLACES = ("outputs/*", "outputs/*/*", "multirun/*/*", "multirun/*/*/*")
"""Where runs, forecasts and jobs of sweeps are by default, or by a name in these folders."""
LATEST = "latest"
"""Word for the run that was started last, wherever a run directory is named."""


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
    folders = [run_dir, *(folder for place in PLACES for folder in Path().glob(place))]
    for file in (folder / name for folder in folders for name in ("summary.json", "preflight.json")):
        with contextlib.suppress(OSError):
            if entry in file.read_text(encoding="utf-8", errors="replace"):
                return True
    return False


def named_run(word: str, besides: str | None = None) -> Path:
    """Return the directory that a word names: with `latest` that of the run, or job of a sweep, that was started last.

    A folder of that name takes precedence; `besides` is the directory of a run that has only begun.

    Raises:
        ConfigError: there is no run in `outputs/` or `multirun/`.
    """
    if word != LATEST or Path(word).exists():
        return Path(word)
    files = (file for place in PLACES for file in Path().glob(f"{place}/.hydra/config.yaml"))
    runs = [file for file in files if (file.parents[1] / "summary.json").is_file()]  # no forecast or evaluation
    runs = [file for file in runs if not (besides and os.path.samefile(file.parents[1], besides))]
    if not runs:
        raise ConfigError("latest: there is no run in outputs/ or multirun/ of this folder; name a run directory")
    newest = max(runs, key=lambda file: file.stat().st_mtime_ns).parents[1]
    if not besides:  # else the process that has started this one says it
        print(f"latest: {newest}", file=sys.stderr)
    return newest
