"""A job of a sweep, in a process of its own: the command line of a single run, watched until it ends."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from grpo.cli import quoted
from grpo.config.folders import config_flags
from grpo.config.schema import register
from grpo.rundir.directory import is_completed
from grpo.rundir.files import read, read_json, write_json
from grpo.rundir.identity import identity, is_same, read_identity
from grpo.rundir.lock import lock
from grpo.rundir.resume import KEY as RESUME
from grpo.rundir.resume import checkpoints
from grpo.rundir.run_dir import OF_A_START
from grpo.rundir.sweep_dir import EPOCHS, SWEEP
from grpo.utils.atomic import atomic
from grpo.utils.hardware import seen_alone
from grpo.utils.terminal import on_signals
from rewards.isolation.system import PR_SET_PDEATHSIG, has_prctl, prctl

PROGRAM = "grpo.train"
FIRST_PORT, PORTS = 20000, 20000
HOW_JOBS_ARE_MADE = re.compile(r"hydra(/|\.)(launcher|sweeper)\b|hydra\.(mode|run|sweep|output_subdir|job\.(num|id))\b")


def run_job(config: DictConfig, hydra: HydraConf) -> float | None:
    """Train a job of a sweep, unless a resumed sweep has completed it; return its accuracy afterwards.

    It returns None if the job failed; the job's `summary.json` has the reason.
    """
    register()  # launchers bring the job into processes that have not seen the command line
    sweep_dir = Path(hydra.sweep.dir)
    overrides = overrides_of(read_json(sweep_dir / SWEEP), config, hydra)
    meeting, first = rendezvous(config.launch.nodes)
    if not first:
        assist(config, hydra, overrides, meeting)
        return None
    folder = begun_before(config, overrides, hydra) or free_folder(Path(hydra.runtime.output_dir))
    file = folder / "summary.json"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        if is_completed(folder):
            tell(folder, "completed before")
        else:
            save(config, overrides, folder / ".hydra")  # the job does so too, if it comes that far
            file.unlink(missing_ok=True)
            ended = {"status": "stopped", "reason": "interrupted"}
            try:
                with own_devices(sweep_dir, hydra.launcher._target_, config.launch.processes) as environment:
                    line = command([*overrides, *resuming(folder), *meeting], folder, hydra)
                    status, reason = train_in_process(line, folder, hydra.runtime.cwd, environment)
                    ended = {"status": "failed", "reason": reason}
            finally:
                if read_json(file).get("status", "running") == "running":  # it could not say how it ended
                    write_json(file, ended)
            if status < 0:  # else it has said so itself
                tell(folder, reason)
    summary = read_json(file)
    return summary["accuracy_after"] if summary.get("status") == "completed" else None


def rendezvous(nodes: int) -> tuple[list[str], bool]:
    """Return the overrides for the rendezvous of this Slurm job's machines, and whether this is the first machine.

    submitit calls the job on each machine. A single machine needs no rendezvous.
    """
    if nodes == 1:
        return [], True
    from submitit import JobEnvironment  # only jobs that it has submitted come here

    slurm = JobEnvironment()
    port = FIRST_PORT + int(slurm.raw_job_id) % PORTS
    return [f"launch.rendezvous={slurm.hostnames[0]}:{port}"], slurm.node == 0


def assist(config: DictConfig, hydra: HydraConf, overrides: Sequence[str], meeting: Sequence[str]) -> None:
    """Train a job on a further machine; the first machine chooses the directory and records the outcome."""
    deadline = time.monotonic() + config.launch.timeout
    while not (folder := begun_before(config, overrides, hydra)):
        if time.monotonic() > deadline:
            tell(Path(hydra.runtime.output_dir), f"not begun on {meeting[0]} within {config.launch.timeout} s")
            return
        time.sleep(1)
    if not is_completed(folder):
        line = command([*overrides, *resuming(folder), *meeting], folder, hydra)
        train_in_process(line, folder, hydra.runtime.cwd, {})


def resuming(folder: Path) -> list[str]:
    """Return the override with which a job resumes from its checkpoints, if it has any."""
    return [f"{RESUME}=auto"] if checkpoints(folder) else []


def save(config: DictConfig, overrides: Sequence[str], folder: Path) -> None:
    """Write the overrides of a job, as Hydra does; other jobs read them at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")
    with atomic(folder / "overrides.yaml") as partial:
        OmegaConf.save(OmegaConf.create(list(overrides)), partial)


def tell(folder: Path, text: str) -> None:
    """Print a line about a job on stderr, if anybody reads it: launchers have processes of their own."""
    with contextlib.suppress(OSError):
        print(f"#{folder.name} {text}", file=sys.stderr, flush=True)


def overrides_of(sweep: dict[str, Any], config: DictConfig, hydra: HydraConf) -> list[str]:
    """Return the overrides of a job: those that Hydra has made, and epochs that follow the size of its groups.

    `config` gets those epochs, too.
    """
    overrides = [text for text in hydra.overrides.task if not text.lstrip("+").startswith("sweep.")]
    same = sweep.get("same_steps_as")
    if same:
        epochs = same["num_train_epochs"] * same["num_generations"] / config.train.num_generations
        overrides.append(f"{EPOCHS}={epochs:g}")
        config.train.num_train_epochs = float(f"{epochs:g}")
    return overrides


def begun_before(config: DictConfig, overrides: Sequence[str], hydra: HydraConf) -> Path | None:
    """Return the directory of the job of this configuration, if it has been begun.

    A job that has trained nothing begins again where it was, also if a file of its configuration has been mended.
    """
    wanted, depth = identity(config), len(Path(hydra.runtime.output_dir).relative_to(hydra.sweep.dir).parts)
    for file in sorted(Path(hydra.sweep.dir).glob("*/" * depth + ".hydra/overrides.yaml")):
        folder = file.parents[1]
        with contextlib.suppress(OSError):
            written = read(file, yaml.safe_load) or []
            ours, theirs = ([text for text in line if not OF_A_START.match(text)] for line in (overrides, written))
            begins_again = ours == theirs and not checkpoints(folder) and not is_completed(folder)
            if is_same(read_identity(folder), wanted) or begins_again:
                return folder
    return None


def free_folder(numbered: Path) -> Path:
    """Return the directory of a new job: Hydra's name, or a similar name if another job has it."""
    free, number = numbered, 0
    while (free / ".hydra").exists():
        free, number = numbered.with_name(f"{numbered.name}_{number + 2}"), number + 1
    return free


def command(overrides: Sequence[str], folder: Path, hydra: HydraConf) -> list[str]:
    """Return the command line of a job: Hydra's overrides without those of launcher and sweeper."""
    options = [text for text in hydra.overrides.hydra if not HOW_JOBS_ARE_MADE.match(text.lstrip("+~"))]
    options += ["hydra.mode=RUN", f"hydra.run.dir={quoted(str(folder))}", f"hydra.sweep.dir={quoted(hydra.sweep.dir)}"]
    options += [f"hydra.job.num={hydra.job.num}", f"hydra.job.id={quoted(str(hydra.job.id))}"]
    options += ["sweep.resume=false"]  # which a file may set
    return [sys.executable, "-m", PROGRAM, *config_flags(hydra), *overrides, *options]


def train_in_process(line: Sequence[str], folder: Path, cwd: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command line; return its exit status, negative for a signal, and the reason of its end.

    The job's lines go to stderr behind its number, its table to `train.log`. Ctrl-C, SIGTERM and SIGHUP are forwarded:
    the job saves a checkpoint, and the sweep ends with it.

    Raises:
        KeyboardInterrupt: this process got a signal to stop, and the job has ended.
    """
    last, told_to_stop = "", False
    with (folder / "train.log").open("a") as log:
        process = subprocess.Popen(
            line,
            cwd=cwd,
            env={key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
            # it does not outlive this process, except where nothing can tell it of its end
            preexec_fn=(lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM)) if has_prctl() else None,
        )

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal told_to_stop
        told_to_stop = True
        process.send_signal(number)

    def listen() -> None:
        nonlocal last
        for text in process.stderr or ():
            tell(folder, text.rstrip())
            last = text.strip() if text.startswith(f"{PROGRAM}: ") else last

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = on_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), pass_on)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it has left running, which may hold its stderr, too
    listener.join(5)
    if told_to_stop:
        raise KeyboardInterrupt
    return status, reason_of(status, last)


def reason_of(status: int, last: str) -> str:
    """Return why a process ended, by its exit status and the last line that it had for the user."""
    if status >= 0:
        return last.removeprefix(f"{PROGRAM}: ") or f"ended with exit status {status}"
    reason = f"killed by {signal.Signals(-status).name}"
    return reason + "; the system does that when host memory is used up" if -status == signal.SIGKILL else reason


@contextlib.contextmanager
def own_devices(sweep_dir: Path, launcher: str, processes: Any = 1) -> Iterator[dict[str, str]]:
    """Take GPUs, or without any the CPU, that no other job of the sweep has, and wait until they are free.

    The environment in which a process sees those devices alone comes back. Each of `launch.processes` gets a GPU; of
    more than there are, the job itself complains. Slurm and Ray give jobs theirs; without a GPU only jobs that submitit
    has all started at once wait for each other.
    """
    gpus = read_json(sweep_dir / SWEEP).get("cards", [])
    if launcher.endswith(("SlurmLauncher", "RayLauncher")) or not (gpus or launcher.endswith("LocalLauncher")):
        yield {}
        return
    devices = gpus or ["cpu"]
    wanted = min(processes, len(devices)) if isinstance(processes, int) else len(devices)
    while True:
        with contextlib.ExitStack() as held:
            taken: list[str] = []
            with locked(sweep_dir / ".devices.lock"):  # else two jobs could each take one of two, and both wait
                for device in devices:
                    with contextlib.suppress(BlockingIOError):
                        if len(taken) < wanted:
                            held.enter_context(locked(lock_of(device, sweep_dir), fcntl.LOCK_NB))
                            taken.append(device)
            if len(taken) == wanted:
                yield seen_alone(",".join(taken)) if gpus else {}
                return
        time.sleep(1)


def lock_of(device: str, sweep_dir: Path) -> Path:
    """Return the lock of a device, as CUDA_VISIBLE_DEVICES names it; a slice is `MIG-GPU-<uuid>/<GI>/<CI>`."""
    return sweep_dir / f".{device.replace('/', '_')}.lock"


@contextlib.contextmanager
def locked(file: Path, option: int = 0) -> Iterator[None]:
    """Hold a lock that all processes of this machine see; with `LOCK_NB`, BlockingIOError if another holds it."""
    with file.open("w") as stream:
        lock(stream, fcntl.LOCK_EX | option)
        yield
