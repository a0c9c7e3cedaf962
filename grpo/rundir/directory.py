"""The choice of a run's directory: a new one, that of the interrupted run that it continues, or a named one."""

import contextlib
import glob
import os
import re
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from grpo.rundir.files import read_json
from grpo.rundir.history import named_run
from grpo.rundir.identity import identity, is_same, read_identity
from grpo.rundir.lock import is_running, taken
from grpo.rundir.resume import KEY, checkpoints, is_auto
from grpo.utils.distributed import BY_US, restarts
from grpo.utils.errors import ConfigError
from rewards.probing.runs import LATEST

NEW_DIRECTORY = "${new_run_directory:}"
NEW_EACH_TIME = re.compile(r"\$\{(new_run_directory|now):[^}]*\}")
"""References in `hydra.run.dir` and `hydra.sweep.dir` that give each start a directory of its own."""

ANY = "\0"
"""Stands for any name in a path."""


def typed(directory: DictConfig) -> str:
    """Return `hydra.run.dir` or `hydra.sweep.dir` unresolved: resolving it may make a directory."""
    return str(OmegaConf.to_container(directory)["dir"])  # type: ignore[call-overload, index]


def choose(config: DictConfig) -> tuple[str, str | bool | None]:
    """Return the directory of a run and the checkpoint to resume from; all that decides them is composed.

    Raises:
        ConfigError: `hydra.run.dir` names the directory of another run.
    """
    resume_from = config.train.resume_from_checkpoint
    if resume_from == LATEST:
        resume_from = str(named_run(LATEST, besides=os.environ.get(BY_US)))
    if run_dir := os.environ.get(BY_US):  # of the process that has started this one
        continues = checkpoints(Path(run_dir)) and (restarts() or not resume_from)
        return run_dir, "auto" if continues else resume_from
    if NEW_EACH_TIME.search(typed(config.hydra.run)):
        run = interrupted_run(config) if is_auto(resume_from) or restarts() else None
        return (str(run), "auto") if run else (config.hydra.run.dir, resume_from)
    run_dir = str(config.hydra.run.dir)
    if not restarts():
        check_directory(Path(run_dir), resume_from)
    return run_dir, "auto" if restarts() and checkpoints(Path(run_dir)) else resume_from


def interrupted_run(config: DictConfig) -> Path | None:
    """Return the newest directory of a run of this configuration that was not completed; None if there is none.

    It is looked for where `hydra.run.dir` makes directories.
    """
    wanted, directory = identity(config), typed(config.hydra.run)
    config.hydra.run.dir = NEW_EACH_TIME.sub(ANY, directory.replace(NEW_DIRECTORY, f"outputs/{ANY}/{ANY}"))
    places, config.hydra.run.dir = glob.escape(config.hydra.run.dir).replace(ANY, "*"), directory
    for run_dir in map(Path, sorted(glob.glob(places), key=in_time, reverse=True)):
        with contextlib.suppress(OSError):  # somebody else's
            left = checkpoints(run_dir) and not is_completed(run_dir) and not is_running(run_dir)
            if left and is_same(read_identity(run_dir), wanted):
                return run_dir
    return None


def in_time(folder: str) -> list[tuple[bool, int, str]]:
    """Return what orders directories that are named by date and time: `12-00-00_10` comes after `12-00-00_2`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", folder)]


def is_completed(run_dir: Path) -> bool:
    """Return whether a run has come to its end."""
    return read_json(run_dir / "summary.json").get("status") == "completed"


def check_directory(run_dir: Path, resume_from: str | bool | None) -> None:
    """Raise a ConfigError if a run is running in a directory, or has ended there and is not continued."""
    if is_running(run_dir):
        raise ConfigError(taken(run_dir))
    if not (run_dir / "summary.json").exists():
        return
    has_checkpoint, completed = bool(checkpoints(run_dir)), is_completed(run_dir)
    if resume_from and not has_checkpoint and not completed:  # nothing in it could be lost
        return
    is_own = is_auto(resume_from) or Path(str(resume_from)).resolve().is_relative_to(run_dir.resolve())
    if resume_from and has_checkpoint and is_own:
        return
    status = read_json(run_dir / "summary.json").get("status", "torn")
    word = "continue" if has_checkpoint else "" if completed else "repeat"
    remedy = f", or {word} it with {KEY}=auto" if word else ""
    raise ConfigError(
        f"hydra.run.dir={run_dir}: there is a run in it ({'killed' if status == 'running' else status}); choose "
        f"another directory{remedy}"
    )


def check_no_run(directory: DictConfig) -> None:
    """Raise a ConfigError if `hydra.run.dir` of another command than a run is the directory of a run."""
    if not NEW_EACH_TIME.search(typed(directory)) and (Path(directory.dir) / "summary.json").exists():
        raise ConfigError(f"hydra.run.dir={directory.dir}: there is a run in it; choose another directory")
