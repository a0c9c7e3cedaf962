"""Finds the logs of a run at a path, and reads them."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo.extras.doctor import metrics
from grpo.extras.doctor.history import History, Row, merged, without_repeats
from grpo.extras.doctor.names import is_of_grpo
from grpo.extras.doctor.tables import completions_in, completions_of
from grpo.rundir.run_dir import Run, read_run
from grpo.utils.errors import ConfigError

ACCEPTED = (
    "trainer_state.json of TRL, completions_*.parquet, logging.jsonl of ms-swift, a log or JSON lines of verl, events "
    "of TensorBoard, a CSV or history of W&B, or a run directory of this project"
)
Reader = Callable[[Path], list[Row]]
KINDS: tuple[tuple[str, str, Reader], ...] = (
    ("ms-swift", "logging.jsonl", metrics.from_lines),
    ("TRL", "trainer_state.json", metrics.from_state),
    ("JSON lines", "*.jsonl", metrics.from_lines),
    ("TensorBoard", "*tfevents*", metrics.from_events),
    ("CSV", "*.csv", metrics.from_csv),
    ("console", "*.log", metrics.from_console),
    ("console", "*.txt", metrics.from_console),
    ("console", "*.out", metrics.from_console),
)
"""Formats in the order in which they are searched: name, pattern of files and reader."""
OF_FOLDERS = (metrics.from_events, metrics.from_csv)
"""Readers of formats with several files per run, in a folder."""
DEPTH = 3
"""Folders below the path that are searched."""


def read(path: Path) -> tuple[History, Run | None]:
    """Return the history at a path, and, of a directory of this project, the run.

    Raises:
        ConfigError: there is no such path, nothing of a run in it, or there are several runs.
    """
    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory; name {ACCEPTED}")
    run = read_run(path) if (path / ".hydra" / "config.yaml").is_file() else None
    if run:
        history = History(f"a run of this project, {path}", path, merged(metrics.rows_of(run.metrics)))
    else:
        history = read_file(path) if path.is_file() else read_folder(path)
    of_run = history.folder.parent if history.folder.name.startswith("checkpoint-") else history.folder
    for folder in dict.fromkeys((of_run, path)):
        if not history.completions and folder.is_dir():
            history.completions, history.notes = completions_of(folder, history.rewards)
    history.completions = without_repeats(history.completions)
    history.steps = history.steps or history.of_completions()
    if not history.steps:
        empty = path.is_dir() and not any(path.iterdir())
        raise ConfigError(f"{path}: {'an empty directory' if empty else 'no step of a run in it'}; name {ACCEPTED}")
    if not is_of_grpo(history.steps):
        raise ConfigError(f"{path}: none of GRPO's metrics in it (reward, reward_std, kl, completions/…)")
    return history, run


def read_file(file: Path) -> History:
    """Return the history in a file, whose kind its name or else its beginning tells.

    Raises:
        ConfigError: nothing of a run is in it.
    """
    if file.suffix == ".parquet":
        if completions := completions_in(file, []):
            return History(f"completions, {file}", file.parent, completions=completions)
        raise ConfigError(f"{file}: torn, or no table of TRL's completions (step, prompt, completion, …)")
    name, _, reader = next((kind for kind in KINDS if file.match(kind[1])), None) or by_content(file)
    if rows := reader(file) or (metrics.from_console(file) if reader is metrics.from_lines else []):
        return History(f"{name}, {file}", file.parent, merged(rows))
    if completions := completions_in(file, []):
        return History(f"completions, {file}", file.parent, completions=completions)
    raise ConfigError(f"{file}: no step of a run in it; name {ACCEPTED}")


def by_content(file: Path) -> tuple[str, str, Reader]:
    """Return the kind of a file whose name says nothing.

    Raises:
        ConfigError: it is not text.
    """
    with file.open("rb") as stream:
        beginning = stream.read(4096)
    if b"\0" in beginning:
        raise ConfigError(f"{file}: neither text nor a known format; name {ACCEPTED}")
    if file.suffix == ".json":
        return "TRL", "*", metrics.from_state
    return ("JSON lines" if beginning.lstrip().startswith(b"{") else "console", "*", metrics.from_lines)


def read_folder(folder: Path) -> History:
    """Return the history in a directory, of the first format that it has; empty if it has none.

    Raises:
        ConfigError: it holds several runs.
    """
    files = sorted(below(folder))
    for name, pattern, reader in KINDS:
        of_files = {file: rows for file in newest(files) if file.match(pattern) and (rows := reader(file))}
        parts = {file.parent if reader in OF_FOLDERS else file for file in of_files}
        if len(parts) > 1:
            places = sorted(run_of(part) for part in parts)
            raise ConfigError(f"{folder}: {len(parts)} runs, such as {places[0]} and {places[-1]}; name one of them")
        if reader is metrics.from_csv:
            columns = Counter(name for rows in of_files.values() for name in set().union(*rows) - {"step"})
            if repeated := [name for name, count in columns.items() if count > 1]:
                raise ConfigError(f"{folder}: several files with {repeated[0]}, of several runs; name one of them")
        if of_files:
            file = next(iter(of_files))
            return History(f"{name}, {file}", file.parent, merged(row for rows in of_files.values() for row in rows))
    return History(f"completions, {folder}", folder)


def run_of(file: Path) -> Path:
    """Return the directory of the run that a checkpoint's file belongs to; any other file as it is."""
    return file.parent.parent if file.parent.name.startswith("checkpoint-") else file


def below(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the files in a folder and in those below it, without hidden ones."""
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir() and depth < DEPTH:
            yield from below(path, depth + 1)
        elif path.is_file():
            yield path


def newest(files: list[Path]) -> list[Path]:
    """Return files without the states of earlier checkpoints of the same run."""
    states = [file for file in files if file.name == "trainer_state.json"]
    last: dict[Path, Path] = {}
    for file in states:
        run = file.parent.parent if file.parent.name.startswith("checkpoint-") else file.parent
        last[run] = max(file, last.get(run, file), key=rank)
    return [file for file in files if file not in states] + list(last.values())


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run of transformers' trainer, the newest first."""
    folders = [path for path in folder.glob("checkpoint-*") if path.is_dir()]
    return sorted(folders, key=lambda path: rank(path / "trainer_state.json"), reverse=True)


def rank(file: Path) -> tuple[bool, int]:
    """Return the order of states: of the final one, then of the highest checkpoint."""
    step = file.parent.name.removeprefix("checkpoint-")
    return step == file.parent.name, int(step) if step.isdecimal() else 0
