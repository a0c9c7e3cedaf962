"""One run per directory: a lock that the system frees at any end of its process."""

import fcntl
import os
import socket
import time
from functools import cache
from pathlib import Path
from typing import IO

from grpo.rundir.files import read_json
from grpo.utils.distributed import agreed
from grpo.utils.errors import ConfigError

LOCK = ".running"
_held: list[IO[str]] = []


def take(run_dir: Path) -> None:
    """Take a run directory until this process ends; ConfigError if another process has it."""
    stream = (run_dir / LOCK).open("a+")
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if is_running(run_dir):
                raise ConfigError(taken(run_dir)) from error
        time.sleep(0.01)  # another process was only looking, as `is_running` does
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}")
    stream.flush()
    _held.append(stream)


def is_running(run_dir: Path) -> bool:
    """Return whether a process has a run directory."""
    if not (run_dir / LOCK).exists():
        return False
    with (run_dir / LOCK).open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def taken(run_dir: Path) -> str:
    """Return a line about the process that has a run directory."""
    owner = (run_dir / LOCK).read_text() or "another process"
    return f"{run_dir}: {owner} trains in it: wait for it, stop it, or choose another directory with hydra.run.dir=…"


def check_directory(arguments: list[str]) -> None:
    """Raise a ConfigError if the directory of a command line has a running run, or an ended one and does not resume."""
    key = "hydra.run.dir="
    named = [text.removeprefix(key).strip("'\"") for text in arguments if text.startswith(key)]
    if not named:
        return
    run_dir = Path(named[-1])
    if is_running(run_dir):
        raise ConfigError(taken(run_dir))
    resumes = any(text.lstrip("+").startswith("train.resume_from_checkpoint=") for text in arguments)
    status = read_json(run_dir / "summary.json").get("status")
    if status and not resumes:
        raise ConfigError(
            f"hydra.run.dir={run_dir}: there is a run in it ({'killed' if status == 'running' else status}); choose "
            "another directory, or continue it with train.resume_from_checkpoint=auto"
        )


@cache
def new_directory(root: str = "outputs") -> str:
    """Make a directory for a run that begins now, `<root>/<date>/<time>`, and return it.

    Runs that begin in the same second get different directories, the second run `<time>_2`. Processes of a run share
    one.
    """
    return agreed("directory", lambda: make_directory(root))


def make_directory(root: str) -> str:
    """Make a directory that no other run has, and return it."""
    begun = time.localtime()
    day = Path(root) / time.strftime("%Y-%m-%d", begun)
    day.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = day / (time.strftime("%H-%M-%S", begun) + (f"_{number}" if number > 1 else ""))
        try:
            folder.mkdir()
            return str(folder)
        except FileExistsError:
            number += 1
