"""Reading the directory of a sweep, for its table and its page."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from grpo.rundir.files import read_json
from grpo.rundir.run_dir import Run, read_run
from grpo.utils.errors import ConfigError

EPOCHS = "train.num_train_epochs"

SWEEP = "sweep.json"
"""File that a sweep writes when it begins."""

COLUMNS = {
    "accuracy": lambda run: show(run.accuracy, "{:.1%}"),
    "reward": lambda run: show(run.reward, "{:.2f}"),
    "steps": lambda run: show(run.summary.get("steps", len(run.metrics)), "{:,}"),
    "tokens/s": lambda run: show(run.tokens_per_second, "{:,.0f}"),
    "peak GiB": lambda run: show(run.peak_gb, "{:.2f}"),
    "time": lambda run: show(run.seconds or None, "{:,.0f} s"),
}


@dataclass(frozen=True)
class Sweep:
    """A sweep, as the directories of its jobs show it."""

    folder: Path
    runs: list[Run]
    """Jobs of the sweep, in the order of their numbers."""
    comparison: str | None
    """The property that all jobs share because the sweep changed a setting; None otherwise."""
    swept: list[str]
    """Keys that were typed with several values."""

    @property
    def varied(self) -> list[str]:
        """Keys of the command line whose values differ between jobs."""
        keys = dict.fromkeys(key for run in self.runs for key in typed(run))
        differ = [key for key in keys if len({typed(run).get(key) for run in self.runs}) > 1]
        return [key for key in keys if key in self.swept or (key in differ and not (key == EPOCHS and self.comparison))]

    def value(self, run: Run, key: str) -> str:
        """Return the value of a key of the command line in a job, a long fraction with four digits."""
        text = typed(run).get(key, "")
        with contextlib.suppress(ValueError):
            return text if len(text) < 8 or "." not in text else f"{float(text):.4g}"
        return text

    def name(self, run: Run) -> str:
        """Return the directory of a job, relative to the sweep's."""
        return str(run.folder.relative_to(self.folder))

    @property
    def failed(self) -> list[Run]:
        """Jobs that have not been completed."""
        return [run for run in self.runs if run.status != "completed"]


def typed(run: Run) -> dict[str, str]:
    """Return the overrides of a run by key."""
    return dict(text.partition("=")[::2] for text in run.overrides)


def show(value: float | None, form: str) -> str:
    """Return a number as text; empty for None."""
    return "" if value is None else form.format(value)


def is_sweep(folder: Path) -> bool:
    """Whether a folder is the directory of a sweep."""
    return any((folder / name).is_file() for name in (SWEEP, "multirun.yaml"))


def read_sweep(folder: Path) -> Sweep:
    """Read the directory of a sweep; ConfigError if no job of it has begun."""
    runs = [read_run(file.parents[1]) for file in folder.glob("**/.hydra/config.yaml")]
    if not runs:
        raise ConfigError(f"{folder}: no job of this sweep has begun")

    def number(run: Run) -> list[tuple[bool, int, str]]:
        parts = str(run.folder.relative_to(folder)).replace("/", "_").split("_")
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    written = read_json(folder / SWEEP)
    return Sweep(folder, sorted(runs, key=number), written.get("comparison"), written.get("swept", []))
