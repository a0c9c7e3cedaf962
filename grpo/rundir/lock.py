"""One run per directory: a lock that the system frees at any end of its process."""

import errno
import fcntl
import os
import socket
import time
from functools import cache
from pathlib import Path
from typing import IO

from grpo.utils.atomic import remove_partials
from grpo.utils.errors import ConfigError

LOCK = ".running"
_held: list[IO[str]] = []


def lock(stream: IO[str], option: int) -> None:
    """Lock a file as flock(2) does; a file system without locks, as of some clusters, grants all of them.

    Raises:
        BlockingIOError: another process has it, and `option` has LOCK_NB.
    """
    try:
        fcntl.flock(stream, option)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
            raise


def take(run_dir: Path) -> None:
    """Take a run directory until this process ends; ConfigError if another process has it."""
    stream = (run_dir / LOCK).open("a+")
    while True:
        try:
            lock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if is_running(run_dir):
                raise ConfigError(taken(run_dir)) from error
        time.sleep(0.01)  # another process was only looking, as `is_running` does
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()}")
    stream.flush()
    _held.append(stream)
    remove_partials(run_dir)


def is_running(run_dir: Path) -> bool:
    """Return whether a process has a run directory."""
    if not (run_dir / LOCK).exists():
        return False
    with (run_dir / LOCK).open() as stream:
        try:
            lock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def taken(run_dir: Path) -> str:
    """Return a line about the process that has a run directory."""
    owner = (run_dir / LOCK).read_text() or "another process"
    return f"{run_dir}: {owner} trains in it: wait for it, stop it, or choose another directory with hydra.run.dir=…"


@cache
def new_directory(root: str = "outputs") -> str:
    """Make a directory for a run that begins now, `<root>/<date>/<time>`, and return it.

    Runs that begin in the same second get different directories, the second run `<time>_2`.
    """
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
