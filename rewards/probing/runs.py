"""Finds the run that was started last in the current folder."""

import os
import sys
from pathlib import Path

PLACES = ("outputs/*", "outputs/*/*", "multirun/*/*", "multirun/*/*/*")
"""Where runs, forecasts and jobs of sweeps are by default, or by a name in these folders."""
LATEST = "latest"
"""Word for the run that was started last, wherever a run directory is named."""


def named_run(word: str, besides: str | None = None) -> Path:
    """Return the directory that a word names: with `latest` that of the run, or job of a sweep, that was started last.

    A folder of that name takes precedence; `besides` is the directory of a run that has only begun.

    Raises:
        ValueError: there is no run in `outputs/` or `multirun/`.
    """
    if word != LATEST or Path(word).exists():
        return Path(word)
    files = (file for place in PLACES for file in Path().glob(f"{place}/.hydra/config.yaml"))
    runs = [file for file in files if (file.parents[1] / "summary.json").is_file()]  # no forecast or evaluation
    runs = [file for file in runs if not (besides and os.path.samefile(file.parents[1], besides))]
    if not runs:
        raise ValueError("latest: there is no run in outputs/ or multirun/ of this folder; name a run directory")
    newest = max(runs, key=lambda file: file.stat().st_mtime_ns).parents[1]
    if not besides:  # else the process that has started this one says it
        print(f"latest: {newest}", file=sys.stderr)
    return newest
