"""Recognition of a full, read-only or removed disk in the exceptions of all libraries."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo.rundir.resume import checkpoints
from grpo.utils.limits import GB
from grpo.utils.spoken import shown

AUTO = "train.resume_from_checkpoint=auto"
LIBRARIES = ("safetensors", "pyarrow")
FAULTS = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "its file system has become read-only",
    errno.EIO: "its disk has failed",
    **dict.fromkeys((errno.ESTALE, errno.ENOTCONN, errno.ENODEV), "its file system has gone"),
}
WITHOUT_NAME = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that only a disk has; the others come from sockets and terminals, too, unless they name a file."""
NUMBER = re.compile(r"(?:os error|\[Errno) (\d+)")
"""Number of a system error in the message of another library, as safetensors' and Arrow's."""
UNFINISHED = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|file write failed")
"""PyTorch's message after a failed write, without the reason."""
UNOPENED = "open file failed with strerror: "
"""PyTorch's message, with the reason, after a file could not be opened."""


def storage_fault(error: BaseException, run_dir: Path) -> str | None:
    """Return a line about the failed disk of a run and the way to continue; None if an exception has another reason."""
    name = shown(run_dir)
    try:
        if not run_dir.is_dir():
            return f"the run directory {name} has been removed, and its checkpoints with it"
        fault = next((text for each in chain(error) if (text := fault_of(each, run_dir))), None)
        if fault is None:
            return None
        left, free = checkpoints(run_dir), shutil.disk_usage(run_dir).free / GB
    except OSError as worse:
        return f"the run directory {name} cannot be reached: {worse.strerror}"
    continues = f"{AUTO} then continues from {left[0].name}" if left else "no checkpoint was complete yet"
    return f"cannot write to {name}: {fault} ({free:.1f} GiB free); mend that, {continues}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it came from."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def fault_of(error: BaseException, run_dir: Path) -> str | None:
    """Return the state of a run's disk according to an exception; None if it names no disk, or another disk."""
    if isinstance(error, OSError):
        file = error.filename
        if isinstance(file, str | Path) and not Path(file).absolute().is_relative_to(run_dir.absolute()):
            return None
        if error.filename is None and error.errno not in (None, *WITHOUT_NAME):
            return None
        return FAULTS.get(error.errno or 0) or fault_of_text(str(error))
    # of libraries written in other languages; any other exception may repeat what somebody else's disk has said
    is_pytorchs = isinstance(error, RuntimeError) and (UNFINISHED.search(str(error)) or UNOPENED in str(error))
    return fault_of_text(str(error)) if is_pytorchs or type(error).__module__.startswith(LIBRARIES) else None


def fault_of_text(text: str) -> str | None:
    """Return the state of the disk according to a library's message; None if it names none."""
    for number in NUMBER.findall(text):
        if int(number) in FAULTS:
            return FAULTS[int(number)]
    for number, words in FAULTS.items():
        if f"{UNOPENED}{os.strerror(number)}" in text:
            return words
    return "a file could not be written to its end; perhaps its disk is full" if UNFINISHED.search(text) else None
