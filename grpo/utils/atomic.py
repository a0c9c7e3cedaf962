"""Files and folders that are written completely or not at all, also if the machine loses its power."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a path for a file or a folder, which replaces `path` at the end unless an exception is raised."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")  # containers have equal process numbers
    try:
        yield partial
        settle(partial, path)
    finally:
        remove(partial)


def settle(partial: Path, path: Path) -> None:
    """Let a file or a folder that has been written take its place once it is on the disk."""
    for written in (*partial.rglob("*"), partial):
        flush(written)
    partial.replace(path)
    flush(path.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def remove_partials(folder: Path) -> None:
    """Remove what killed processes have left half written in a folder in which no other process writes."""
    for partial in (*folder.glob("*.partial"), *folder.glob("*.partial-*"), *folder.glob("*/*.partial-*")):
        with contextlib.suppress(OSError):  # somebody else's, perhaps
            remove(partial)


def flush(path: Path) -> None:
    """Wait until a file or the entries of a folder are on the disk, where its file system can say so; see fsync(2)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)
