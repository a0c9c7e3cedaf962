"""Readers of logged metrics: `trainer_state.json`, JSON lines, consoles, CSV exports and TensorBoard's events.

A reader takes a file and returns rows with `step` under TRL's names, none if the file is of another kind.
"""

import ast
import contextlib
import csv
import json
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from grpo.extras.doctor.history import Row, number
from grpo.extras.doctor.names import named
from grpo.utils.errors import ConfigError

STEP_NAMES = (
    "train/global_step",
    "global_step/max_steps",
    "iteration",
    "trainer/global_step",
    "global_step",
    "step",
    "_step",
    "Step",
)
"""Names of the step, the most exact first; ms-swift writes `12/100`."""
OF_TABLES = {"prompt", "completion", "input", "output"}
"""Keys of completions, whose lines are not of a step."""
ANSI = re.compile(r"\x1b\[[0-9;]*m")
OF_VERL = re.compile(r"\bstep:(\d+) - (\S.*)")
ROUNDED = re.compile(r"-?\d+\.\d{3}")
"""A number as verl before 0.5 prints all of them."""
LOST = re.compile(r"/(lr|grad_norm|loss|pg_loss)$")
"""Metrics whose 0.000 may be another number, rounded."""
OF_CHART = re.compile(r"(?P<run>.+) - (?P<metric>[^_].*?)(?P<end>__MIN|__MAX)?")
"""A column of a chart exported from W&B."""


def from_state(file: Path) -> list[Row]:
    """Return the rows of `trainer_state.json`.

    Raises:
        ConfigError: it is torn, or no state of transformers' trainer.
    """
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: torn, or not JSON: {str(error)[:80]}") from error
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list):
        raise ConfigError(f"{file}: not a trainer_state.json, as it has no list log_history")
    return rows_of(row for row in history if isinstance(row, dict))


def rows_of(logged: Iterable[Row]) -> list[Row]:
    """Return rows under TRL's names; those without a step or without a metric of a step are omitted."""
    rows = []
    for entry in logged:
        if OF_TABLES & entry.keys():
            continue
        data = entry.get("data")
        step, row = step_of(entry), named(data if isinstance(data, dict) else entry)
        if step is not None and row:
            rows.append({"step": step, **row})
    return rows


def step_of(entry: Row) -> int | None:
    """Return the step of an entry of a log; None without one."""
    for name in STEP_NAMES:
        value = entry.get(name)
        step = number(value.partition("/")[0] if isinstance(value, str) else value)
        if step is not None and 0 <= step < 2**53:
            return int(step)
    return None


def from_lines(file: Path) -> list[Row]:
    """Return the rows of JSON lines: of ms-swift, verl's file logger, W&B's history or this project; torn ones not."""
    return rows_of(entry for entry in json_lines(file))


def json_lines(file: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    yield entry


def from_console(file: Path) -> list[Row]:
    """Return the rows of a console's log: verl's lines `step:1 - …`, and dictionaries of TRL or ms-swift.

    A line of TRL's has no step, so that its place among these lines counts.
    """
    entries: list[Row] = []
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = ANSI.sub("", line)
            if match := OF_VERL.search(text):
                entries.append(of_verl(int(match[1]), match[2]))
            elif "'loss'" in text and (start := text.find("{")) >= 0:
                with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
                    entry = ast.literal_eval(text[start : text.rfind("}") + 1])
                    entries.append({"step": len(entries) + 1, **entry})
    return rows_of(entries)


def of_verl(step: int, text: str) -> Row:
    """Return the metrics of a line of verl's console; of rounded ones, those that may have become 0 are omitted."""
    pairs = [part.rpartition(":") for part in text.strip().split(" - ")]
    values = {name: value for name, _, value in pairs if name and number(value) is not None}
    if values and all(ROUNDED.fullmatch(value) for value in values.values()):
        lost = [name for name, value in values.items() if number(value) == 0 and LOST.search(name)]
        values = {name: value for name, value in values.items() if name not in lost}
    return {"step": step, "data": values}


def from_csv(file: Path) -> list[Row]:
    """Return the rows of an export of W&B: a chart, `RUN - train/reward`, or a history, `train/reward`.

    Raises:
        ConfigError: several runs are in it.
    """
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            entries = list(csv.DictReader(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file}: cannot be read as CSV: {error}") from error
    columns = [name for name in (entries[0] if entries else {}) if name]
    charts = {name: match for name in columns if (match := OF_CHART.fullmatch(name))}
    runs = sorted({match["run"] for match in charts.values()})
    if len(runs) > 1:
        raise ConfigError(f"{file}: {len(runs)} runs, {runs[0]!r} and {runs[1]!r} among them; export one run")
    plain = {name: charts[name]["metric"] if name in charts else name for name in columns}
    bounds = {name for name, match in charts.items() if match["end"]}
    return rows_of({plain[name]: entry[name] for name in columns if name not in bounds} for entry in entries)


def from_events(file: Path) -> list[Row]:
    """Return the rows of TensorBoard's event file."""
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    try:
        events.Reload()
    except Exception as error:  # of a file with another content: the readers of TensorBoard have no class for it
        raise ConfigError(f"{file}: TensorBoard cannot read it: {type(error).__name__}") from error
    by_step: dict[int, Row] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            by_step.setdefault(event.step, {"step": event.step})[name] = event.value
    return rows_of({"step": row.pop("step"), "data": row} for row in by_step.values())
