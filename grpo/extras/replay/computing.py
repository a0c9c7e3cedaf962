"""Starts the training of a run again, in a directory of its own, from a checkpoint up to a step."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo.extras.replay.recorder import FOLDER, ORIGIN
from grpo.launching.causes import STOPPED
from grpo.rundir.files import RESOLVED_CONFIG, read, read_json, write_json
from grpo.rundir.resume import checkpoints
from grpo.utils.errors import ConfigError, RunError

SINCE = "a run keeps it from replay.keep=… on"


@dataclass(frozen=True)
class Stored:
    """Steps that a run has kept."""

    run: Path
    steps: list[int]
    """Steps whose update is in `replay/`, in their order."""

    def start_of(self, step: int) -> int:
        """Return the step of the checkpoint from which a step is computed again; 0 for the beginning of the run.

        Raises:
            ConfigError: the step, or one before it, cannot be computed.
        """
        saved = [int(folder.name[11:]) for folder in checkpoints(self.run)]
        starts = {
            number: max((start for start in saved if start < number), default=0) for number in self.steps if number
        }
        possible = [number for number, start in starts.items() if {*range(start + 1, number)} <= {*self.steps}]
        if step not in possible:
            span = f"steps {possible[0]} to {possible[-1]} are possible" if possible else "no step is possible"
            raise ConfigError(
                f"step={step}: a checkpoint before it and all steps in between are needed; {span}; {SINCE}"
            )
        return starts[step]


def stored_steps(run: Path) -> Stored:
    """Return what a run has kept.

    Raises:
        ConfigError: it is no run, or has kept nothing.
    """
    if not (run / RESOLVED_CONFIG).is_file():
        raise ConfigError(f"{run}: there is no run in it; name a directory such as outputs/2026-01-01/12-00-00")
    names = [file.name for file in (run / FOLDER).glob("update_*.pt")]
    steps = sorted({int(name[7:12]) for name in names})
    if not any(steps) or not (run / FOLDER / ORIGIN).is_file():
        raise ConfigError(f"{run}: it has kept no steps; {SINCE}, and earlier versions kept none")
    return Stored(run, steps)


def compute_again(stored: Stored, start: int, step: int, folder: Path, overrides: Sequence[str]) -> None:
    """Compute the steps after `start` up to `step` of a run again, recorded in `folder`.

    Raises:
        RunError: it failed; the message has the reason, and `folder` the log.
    """
    run = stored.run.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = read(run / RESOLVED_CONFIG, yaml.safe_load)
    change(config, run, start, step)
    config["defaults"] = ["schema", {"override hydra/help": "grpo"}, {"override hydra/job_logging": "file"}, "_self_"]
    config["hydra"] = {"run": {"dir": str(folder)}, "output_subdir": None}  # it is no run
    (folder / "again.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    evaluation = read_json(run / "evaluation.json")
    write_json(folder / "evaluation.json", {"before": evaluation.get("before", {"accuracy": 0.0})})
    command = [sys.executable, "-m", "grpo.train", f"--config-dir={folder}", "--config-name=again", *overrides]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=False)
    if result.returncode != STOPPED:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1].removeprefix("grpo.train: ") if lines else "no reason was given"
        log = f"; the log is in {os.path.relpath(folder / 'train.log')}" if (folder / "train.log").exists() else ""
        raise RunError(f"step {step} could not be computed: {reason}{log}", status=1)


def change(config: dict[str, Any], run: Path, start: int, step: int) -> None:
    """Change a run's configuration so that it computes again, without an engine, an evaluation and checkpoints."""
    origin = read_json(run / FOLDER / ORIGIN)
    train = config["train"]
    train |= {"save_strategy": "no", "report_to": "none", "max_steps": origin["max_steps"], "push_to_hub": False}
    train["resume_from_checkpoint"] = str(run / f"checkpoint-{start}") if start else None
    config["plan"]["enforce"] = False
    config["callbacks"] = {
        "replay": {"fn": "grpo.extras.replay.again.again", "kwargs": {"run": str(run), "until": step}}
    }
    config["engine"] |= {"staleness": 0, "share_weights": False}
    if train["use_vllm"]:
        train |= {"vllm_mode": "colocate", "vllm_enable_sleep_mode": False}
        config["engine"]["backend"] = "grpo.extras.replay.again.NoEngine"
    if not start:
        config["task"]["eval"]["size"] = 0
