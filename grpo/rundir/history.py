"""Which tasks have been run in this folder before."""

import contextlib
import json
from pathlib import Path

from omegaconf import DictConfig

from grpo.config.mixture import single_tasks

PLACES = ("outputs/*/*", "multirun/*/*/*")
"""Where runs, forecasts and jobs of sweeps are by default."""


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
