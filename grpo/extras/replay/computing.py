"""Starts the training of a run again, in a directory of its own, from a checkpoint up to a step."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from grpo.config.messages import meant
from grpo.extras.replay.compare import read_record
from grpo.extras.replay.origin import read_origin
from grpo.extras.replay.recorder import FOLDER
from grpo.launching.causes import STOPPED
from grpo.rundir.files import RESOLVED_CONFIG, read, read_json, write_json
from grpo.rundir.resume import checkpoints
from grpo.utils.errors import ConfigError, RunError

WRONG_INPUT = 2
"""Exit status of commands."""
SINCE = "records of its steps are kept from the next run on with replay.keep=20, for example"


@dataclass(frozen=True)
class Stored:
    """Steps that a run has kept."""

    run: Path
    steps: list[int]
    """Steps whose update is in `replay/`, in their order; a first one, of a checkpoint, may have no rollouts."""

    def start_of(self, step: int) -> int:
        """Return the step of the checkpoint from which a step is computed again; 0 for the beginning of the run.

        Raises:
            ConfigError: the step, or one before it, cannot be computed, or a record of them is torn.
        """
        saved = [int(folder.name[11:]) for folder in checkpoints(self.run)]
        starts = {
            number: max((start for start in saved if start < number), default=0) for number in self.steps if number
        }
        possible = [number for number, start in starts.items() if {*range(start + 1, number)} <= {*self.steps}]
        if step not in possible:
            raise ConfigError(f"{self.run}: step={step}: {self.why_not(step, possible)}")
        for number in range(starts[step] + 1, step + 1):
            for file in sorted((self.run / FOLDER).glob(f"*_{number:05d}*.pt")):
                read_record(file)
        return starts[step]

    def why_not(self, step: int, possible: list[int]) -> str:
        """Return why a step cannot be computed again, and which steps can."""
        if step > self.steps[-1]:
            reason = f"its last step is {self.steps[-1]}"
        elif step in self.steps:
            reason = "the checkpoint before it, or the records of a step in between, are missing"
        else:
            reason = "its records are not kept; replay.keep is the number of steps that are"
        span = f"steps {possible[0]} to {possible[-1]} can be computed" if possible else "no step can be computed"
        return f"{reason}; {span}"


def stored_steps(run: Path) -> Stored:
    """Return what a run has kept.

    Raises:
        ConfigError: it is no run, or has kept nothing.
    """
    check_run(run)
    names = [file.name for file in (run / FOLDER).glob("update_*.pt")]
    steps = sorted({int(name[7:12]) for name in names})
    if not any(steps):
        raise ConfigError(f"{run}: there are no records of its steps; {SINCE}")
    read_origin(run / FOLDER)
    return Stored(run, steps)


def check_run(run: Path) -> None:
    """Raise a ConfigError if a path is no directory of a run."""
    if not run.is_dir():
        raise ConfigError(f"{run}: there is no such directory; name a run such as outputs/2026-01-01/12-00-00")
    if not (run / RESOLVED_CONFIG).is_file():
        why = "the run failed before its first step" if (run / "summary.json").is_file() else "no run"
        raise ConfigError(f"{run}: {why}, as there is no {RESOLVED_CONFIG}; name a run directory")


def compute_again(stored: Stored, start: int, step: int, folder: Path, overrides: Sequence[str]) -> None:
    """Compute the steps after `start` up to `step` of a run again, recorded in `folder`.

    Args:
        overrides: options of the run's rewards, in Hydra's grammar.

    Raises:
        ConfigError: the run has no such reward, or the reward cannot be used.
        RunError: it failed; the message has the reason, and `folder` the log.
    """
    run = stored.run.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    config = read(run / RESOLVED_CONFIG, yaml.safe_load)
    change(config, run, start, step)
    change_rewards(config["reward"], overrides)
    config["defaults"] = ["schema", {"override hydra/help": "grpo"}, {"override hydra/job_logging": "file"}, "_self_"]
    config["hydra"] = {"run": {"dir": str(folder)}, "output_subdir": None}  # it is no run
    (folder / "again.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    if before := read_json(run / "evaluation.json").get("before"):  # it is not evaluated again
        write_json(folder / "evaluation.json", {"before": before})
    command = [sys.executable, "-m", "grpo.train", f"--config-dir={folder}", "--config-name=again"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=False)
    if result.returncode != STOPPED:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1].removeprefix("grpo.train: ") if lines else "no reason was given"
        if result.returncode == WRONG_INPUT:
            raise ConfigError(reason)
        raise RunError(f"step {step} could not be computed: {reason}", status=1)


def change(config: dict[str, Any], run: Path, start: int, step: int) -> None:
    """Change a run's configuration so that it computes again, without an engine, an evaluation and checkpoints."""
    origin = read_origin(run / FOLDER)
    train = config["train"]
    train |= {"save_strategy": "no", "report_to": "none", "max_steps": origin["max_steps"], "push_to_hub": False}
    train["resume_from_checkpoint"] = str(run / f"checkpoint-{start}") if start else None
    config["plan"]["enforce"], config["guard"] = False, {}
    config["callbacks"] = {
        "replay": {"fn": "grpo.extras.replay.again.again", "kwargs": {"run": str(run), "until": step}}
    }
    config["engine"] |= {"staleness": 0, "share_weights": False, "drafts": None}
    if train["use_vllm"]:
        train |= {"vllm_mode": "colocate", "vllm_enable_sleep_mode": False}
        config["engine"]["backend"] = "grpo.extras.replay.again.NoEngine"
    if not start:  # where an evaluation would come first
        for task in (config["task"], *(mixed["task"] for mixed in config["task"]["tasks"].values())):
            task["eval"]["size"] = 0


def change_rewards(rewards: dict[str, Any], overrides: Sequence[str]) -> None:
    """Change options of rewards.

    Raises:
        ConfigError: the run has no such reward.
        HydraException: an override is malformed.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        _, name, *keys = override.key_or_group.split(".")
        if name not in rewards:
            raise ConfigError(f"reward.{name}: the run has no such reward{meant(name, list(rewards))}")
        place = rewards[name]
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = override.value()
