"""The directory of a sweep, read for its table and its page."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from grpo.errors import ConfigError
from grpo.runs.files import read_json
from grpo.runs.run_dir import Run, read_run

EPOCHS = "train.num_train_epochs"

SWEEP = "sweep.json"
"""What is written down of a sweep when it begins."""

COLUMNS = {
    "accuracy": lambda run: show(run.accuracy, "{:.1%}"),
    "reward": lambda run: show(run.reward, "{:.2f}"),
    "steps": lambda run: show(run.summary.get("steps", len(run.metrics)), "{:,}"),
    "tokens/s": lambda run: show(run.tokens_per_second, "{:,.0f}"),
    "peak GB": lambda run: show(run.peak_gb, "{:.2f}"),
    "time": lambda run: show(run.seconds or None, "{:,.0f} s"),
}


@dataclass(frozen=True)
class Sweep:
    """The jobs of a sweep, as they have left their directories."""

    folder: Path
    runs: list[Run]
    comparison: str | None
    """What is the same in all jobs, if something had to be changed for it."""
    swept: list[str]
    """The keys that were typed with several values."""

    @property
    def varied(self) -> list[str]:
        """The keys of the command line that are not the same in all jobs."""
        keys = dict.fromkeys(key for run in self.runs for key in typed(run))
        differ = [key for key in keys if len({typed(run).get(key) for run in self.runs}) > 1]
        return [key for key in keys if key in self.swept or (key in differ and not (key == EPOCHS and self.comparison))]

    def value(self, run: Run, key: str) -> str:
        """Return what a key of the command line was in a job; a long fraction with four digits."""
        text = typed(run).get(key, "")
        with contextlib.suppress(ValueError):
            return text if len(text) < 8 or "." not in text else f"{float(text):.4g}"
        return text

    def name(self, run: Run) -> str:
        """Return the directory of a job, inside the sweep's."""
        return str(run.folder.relative_to(self.folder))

    @property
    def failed(self) -> list[Run]:
        """The jobs that have not been completed."""
        return [run for run in self.runs if run.status != "completed"]


def typed(run: Run) -> dict[str, str]:
    """Return the overrides of a run by their keys."""
    return dict(text.partition("=")[::2] for text in run.overrides)


def show(value: float | None, form: str) -> str:
    """Return a number as text, or nothing where there is none."""
    return "" if value is None else form.format(value)


def is_sweep(folder: Path) -> bool:
    """Whether a directory is that of a sweep."""
    return any((folder / name).is_file() for name in (SWEEP, "multirun.yaml"))


def read_sweep(folder: Path) -> Sweep:
    """Read the directory of a sweep: its jobs in the order of their numbers.

    Raises:
        ConfigError: no job has begun in it.
    """
    runs = [read_run(file.parents[1]) for file in folder.glob("**/.hydra/config.yaml")]
    if not runs:
        raise ConfigError(f"{folder}: no job of this sweep has begun")

    def number(run: Run) -> list[tuple[bool, int, str]]:
        parts = str(run.folder.relative_to(folder)).replace("/", "_").split("_")
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    written = read_json(folder / SWEEP)
    return Sweep(folder, sorted(runs, key=number), written.get("comparison"), written.get("swept", []))
