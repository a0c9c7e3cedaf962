"""Findings about the looks of a guarded run (docs/guard.md)."""

from grpo.reporting.findings.base import Finding
from grpo.rundir.files import read_lines
from grpo.rundir.run_dir import Run

FILE = "guard.jsonl"
TITLES = {
    "fall": "Accuracy fell, and the guard ended the run",
    "rollback": "Accuracy fell, and the run went back to its best checkpoint",
    "plateau": "Accuracy rose no longer, and the guard ended the run",
    "skipped": "The grader failed when the guard looked",
}
"""Titles by event; the first that has happened names the finding."""


def guard_acted(run: Run) -> Finding | None:
    """The guard has gone back to a checkpoint, ended the run, or could not see its accuracy."""
    looks = [look for look in read_lines(run.folder / FILE) if look["event"] in TITLES]
    if not looks:
        return None
    event = next(event for event in TITLES if any(look["event"] == event for look in looks))
    advice = {
        "plateau": "the model is that of the best look; more steps, harder problems or larger groups may teach more",
        "skipped": "reward_errors.jsonl has the errors of the grader",
    }
    falls = sum(look["event"] in ("rollback", "fall") for look in looks)
    lower = f"begin with train.learning_rate={run.config.train.learning_rate / 2**falls:g}, clip more (train.epsilon), "
    lower += "or read the completions since the best look: does the reward pay for anything but answers?"
    evidence = "; ".join(f"step {look['step']}: {look['reason']}" for look in looks)
    return Finding(f"guard_{event}", TITLES[event], evidence, advice.get(event, lower))
