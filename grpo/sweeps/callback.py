"""Sweeps: `python -m grpo.train -m train.num_generations=2,4,8`. Hydra makes the jobs; each trains in its own process.

GPU memory and vLLM engines are therefore released between jobs, and a failure of a job does not affect the others.
"""

import contextlib
import fcntl
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.table import Table

from grpo.cli import leave, quoted
from grpo.config.batch import node_range
from grpo.rundir.directory import NEW_EACH_TIME
from grpo.rundir.directory import typed as typed_directory
from grpo.rundir.files import read_json, write_json
from grpo.rundir.identity import identity, is_same
from grpo.rundir.resume import KEY as RESUME
from grpo.rundir.sweep_dir import COLUMNS, EPOCHS, SWEEP, Sweep, read_sweep
from grpo.sweeps.job import PROGRAM, locked
from grpo.utils.distributed import world_size
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import visible_gpus
from grpo.utils.spoken import shown
from grpo.utils.terminal import plain_console
from rewards.probing.runs import LATEST

INTERRUPTED = 130
"""The exit status after Ctrl-C."""
GENERATIONS = "train.num_generations"
SETS_STEPS = {"task", "experiment", "train", "gpu", "task.dataset.size", "train.num_iterations"}
SETS_STEPS |= {"train.per_device_train_batch_size", "train.gradient_accumulation_steps"}
SETS_STEPS |= {"train.steps_per_generation", "train.generation_batch_size"}
"""Other keys that determine the number of steps per epoch."""


class SweepFolder(Callback):
    """Hydra's callback: prepares the directory of a sweep before its first job."""

    wanted = False
    """Whether the sweep's jobs are training runs."""
    begun: Path | None = None
    """The directory of the sweep that this process has begun."""
    before_run: Callable[[DictConfig], None] | None = None
    """Chooses the directory of a single run."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        if SweepFolder.before_run:
            try:
                with read_write(config), open_dict(config):
                    SweepFolder.before_run(config)
            except Exception as error:  # Hydra would warn and continue
                leave(error, PROGRAM)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if not self.wanted:
            return
        try:
            SweepFolder.begun = begin(config)
        except Exception as error:  # Hydra would warn and continue
            leave(error, PROGRAM)


@contextlib.contextmanager
def recorded(before_run: Callable[[DictConfig], None]) -> Iterator[None]:
    """Context that records a sweep, and exits with its table, its page and its exit status.

    `before_run` gets the configuration of a single run, before Hydra makes its directory.
    """
    SweepFolder.wanted, SweepFolder.before_run = True, before_run
    status: Any = 1
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code
        raise
    finally:
        if SweepFolder.begun:
            finish(SweepFolder.begun, status)


def begin(config: DictConfig) -> Path:
    """Make the directory of a sweep and write the swept keys; `config` is the configuration without the sweep.

    Raises:
        ConfigError: the directory has a sweep, or there is no sweep to resume.
    """
    if world_size() > 1:
        raise ConfigError("-m: not under torchrun; launch.processes=2 gives each job two processes")
    typed = [text for text in config.hydra.overrides.task if not text.lstrip("+").startswith("sweep.")]
    if any(text.lstrip("+").startswith(f"{RESUME}=") and LATEST in re.split("[=,]", text) for text in typed):
        raise ConfigError(f"-m: {RESUME}={LATEST}: to each job that is the job before it; name the run directory")
    folder = Path(os.path.abspath(config.hydra.sweep.dir))  # as Hydra has it
    ident = identity_of_sweep(config)
    if config.sweep.resume and not (folder / SWEEP).exists():
        if not NEW_EACH_TIME.search(typed_directory(config.hydra.sweep)):
            raise ConfigError(f"sweep.resume=true: there is no sweep in hydra.sweep.dir={shown(folder)}")
        folder = newest_sweep(ident, folder.parents[1])
    if any(folder.glob("**/.hydra/config.yaml")) and not config.sweep.resume:
        raise ConfigError(
            f"hydra.sweep.dir={shown(folder)}: there is a sweep in it; sweep.resume=true runs what is "
            "missing or failed, another directory starts a new sweep"
        )
    if "optuna" in config.hydra.sweeper._target_ and config.task.eval.size == 0:
        raise ConfigError("task.eval.size=0: hydra/sweeper=optuna looks for the highest accuracy; hold problems out")
    swept, same, comparison = keys_of_sweep(config, typed), None, None
    check_machines(config, swept)
    folder.mkdir(parents=True, exist_ok=True)
    with read_write(config), open_dict(config):
        if OmegaConf.select(config, "hydra.sweeper.sampler.seed", default=0) is None:
            config.hydra.sweeper.sampler.seed = 0  # the same command makes the same jobs, which `sweep.resume` can find
        config.hydra.sweep.dir = str(folder)
        # the jobs write `.hydra` themselves
        config.hydra.overrides.hydra += [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.output_subdir=null"]
        if follows_groups(config, typed, swept):
            train = config.train
            same = {"num_train_epochs": train.num_train_epochs, "num_generations": train.num_generations}
            comparison = (
                f"the same number of completions per step in every job as with {GENERATIONS}={train.num_generations}, "
                f"and about the same number of steps: prompts per step and {EPOCHS} change; {EPOCHS}=… or "
                "train.max_steps=… overrides this"
            )
            print(f"{PROGRAM}: {comparison}", file=sys.stderr)
    written = {"overrides": typed, "identity": ident, "swept": swept, "comparison": comparison, "same_steps_as": same}
    write_json(folder / SWEEP, {**written, "cards": visible_gpus()})
    return folder


def identity_of_sweep(config: DictConfig) -> list[Any]:
    """Return what was composed for all jobs, and what is swept."""
    parsed = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
    swept = sorted(str(override.input_line) for override in parsed if override.is_sweep_override())
    return [identity(config), swept, OmegaConf.to_container(config.hydra.sweeper).get("params")]  # type: ignore[union-attr]


def newest_sweep(wanted: list[Any], sweeps: Path) -> Path:
    """Return the newest directory in `sweeps/*/*` of a sweep of this identity; ConfigError if there is none."""
    for file in sorted(sweeps.glob(f"*/*/{SWEEP}"), reverse=True):
        with contextlib.suppress(OSError):  # somebody else's
            config, *swept = read_json(file).get("identity", [{}])
            if swept == wanted[1:] and is_same(config, wanted[0]):
                return file.parent
    raise ConfigError(
        f"sweep.resume=true: no sweep of this configuration in {shown(sweeps)}; name it with hydra.sweep.dir=…"
    )


def check_machines(config: DictConfig, swept: Sequence[str]) -> None:
    """Raise a ConfigError unless each job gets its number of machines; `swept` keys have several values."""
    (nodes, most), launcher = node_range(config), config.hydra.launcher
    if "launch.nodes" in swept or nodes < most:
        raise ConfigError("launch.nodes: one number for all jobs of a sweep")
    if not launcher._target_.endswith("SlurmLauncher"):
        if nodes > 1:
            raise ConfigError(
                f"launch.nodes={nodes}: a job of a sweep has several machines with hydra/launcher=submitit_slurm only"
            )
    elif launcher.nodes != nodes:
        raise ConfigError(f"hydra.launcher.nodes={launcher.nodes}: launch.nodes={nodes} is the number of machines")


def keys_of_sweep(config: DictConfig, typed: list[str]) -> list[str]:
    """Return the keys that a sweep gives several values, on the command line or as parameters of its sweeper."""
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*params, *typed])
    return [override.get_key_element() for override in parsed if override.is_sweep_override()]


def follows_groups(config: DictConfig, typed: list[str], swept: list[str]) -> bool:
    """Return whether the number of epochs follows the swept `num_generations`, so that all jobs do as many steps.

    A batch holds the same number of completions for every group size, so with larger groups an epoch has more steps.
    The number of epochs stays if another key sets the number of steps, or if the sweep varies the batch.
    """
    keys = {text.lstrip("+").partition("=")[0] for text in (*typed, *(f"{key}=" for key in swept))}
    decided = EPOCHS in keys or "train.max_steps" in keys or config.train.max_steps > 0
    return GENERATIONS in swept and not decided and not {key.lstrip("+") for key in swept} & SETS_STEPS


def finish(folder: Path, status: Any) -> None:
    """Print the table of a sweep, write its page, and exit with status 0, or 1 if a job failed."""
    from grpo.reporting.page import write_report

    for file in folder.glob("**/.hydra/config.yaml"):
        note_if_killed(file.parents[1])
    try:
        sweep = read_sweep(folder)
    except ConfigError:  # nothing has begun
        return
    print_sweep(sweep)
    for written in (*(run.folder for run in sweep.failed), folder):
        try:
            page = shown(write_report(written))
        except Exception as error:  # the outcome of the sweep is what counts
            page = f"none, {' '.join(str(error).split())}"
    print(f"page: {page}")
    again = "the same command with sweep.resume=true"
    if status == INTERRUPTED:
        print(f"{PROGRAM}: {again} continues with the jobs that are not completed", file=sys.stderr)
    elif sweep.failed:
        failures = f"{len(sweep.failed)} of {len(sweep.runs)} jobs failed"
        print(f"{PROGRAM}: {failures}; once that is fixed, {again} runs them", file=sys.stderr)
    for run in sweep.failed:
        told = [f"{key}={sweep.value(run, key)}" for key in sweep.varied]
        told = [text for text in told if not run.reason.startswith(f"{text}:")]
        print(f"  #{sweep.name(run)} {' '.join(told)}{': ' if told else ''}{run.reason}", file=sys.stderr)
    if sweep.failed and not status:
        sys.exit(1)


def print_sweep(sweep: Sweep) -> None:
    """Print a row for each job."""
    title = f"GRPO sweep {shown(sweep.folder)}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("job", *sweep.varied, "status"):
        name = heading.rpartition(".")[2]
        table.add_column(name, overflow="fold", min_width=9 if heading == "status" else len(name))
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in sweep.runs:
        cells = [cell(run) for cell in COLUMNS.values()]
        values = [sweep.value(run, key) for key in sweep.varied]
        table.add_row(sweep.name(run), *values, run.status, *cells)
    plain_console().print(table)


def note_if_killed(job_dir: Path) -> None:
    """Record that a job was killed, if it has recorded no outcome and its watching process is gone."""
    file = job_dir / "summary.json"
    if read_json(file).get("status", "running") == "running":
        with contextlib.suppress(OSError), locked(job_dir / ".lock", fcntl.LOCK_NB):
            write_json(file, {"status": "stopped", "reason": "killed with its sweep"})
