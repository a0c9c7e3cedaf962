"""Results that a resume makes obsolete: they are kept in a folder in which nothing looks for results."""

import re
from pathlib import Path

from grpo.rundir.files import read_json, read_lines, write_json, write_lines
from grpo.utils.atomic import remove
from grpo.utils.manifest import is_sealed

FOLDER = "set_aside"
"""Folder of a run directory, with a numbered folder for each time."""
RESULTS = ("model", "evaluation_after*.jsonl")
"""Results of a run that has come to its end."""
MADE_OF_THEM = ("export", "evaluate", "report.html", "report.json")
STEP = re.compile(r"(?:checkpoint-|\w+_)(\d+)(?:\.parquet)?")
"""Names of the checkpoints and the completions of a step."""


def set_aside(run_dir: Path, step: int, last_step: int) -> Path | None:
    """Move results of later steps than the one that a run continues from; return the folder, None without any.

    A model and what was made of it are of a later step too, or will be old, unless this step is the last one. Steps
    after the last checkpoint alone, as of a killed run, are repeated: half of their checkpoint is removed.
    """
    later = [path for path in run_dir.glob("checkpoint-*") if step_of(path) > step]
    for half in [path for path in later if not (is_sealed(path) or (path / "trainer_state.json").exists())]:
        later.remove(half)
        remove(half)
    results = [path for name in RESULTS for path in run_dir.glob(name)]
    if not (later or (results and step < last_step)):
        return None
    metrics, evaluation = read_lines(run_dir / "metrics.jsonl"), read_json(run_dir / "evaluation.json")
    completions = [path for path in run_dir.glob("completions/*.parquet") if step_of(path) > step]
    others = [path for name in MADE_OF_THEM for path in run_dir.glob(name)]
    times = [int(path.name) for path in run_dir.glob(f"{FOLDER}/*") if path.name.isdigit()]
    folder = run_dir / FOLDER / str(max(times, default=0) + 1)
    # checkpoints from the newest on: none without those before it is left by a kill in between
    for path in [*results, *others, *completions, *sorted(later, key=step_of, reverse=True)]:
        place = folder / path.relative_to(run_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    if any(row["step"] > step for row in metrics):
        write_lines(folder / "metrics.jsonl", metrics)
    if "after" in evaluation:
        write_json(folder / "evaluation.json", evaluation)
        write_json(run_dir / "evaluation.json", {when: it for when, it in evaluation.items() if when != "after"})
    return folder


def step_of(path: Path) -> int:
    """Return the step of a checkpoint or of a file of completions; 0 of anything else."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else 0
