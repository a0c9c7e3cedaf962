"""A disk that is full, read-only or gone, recognised whatever library has met it."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo.limits import GB
from grpo.runs.resume import checkpoints

FAULTS = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "its file system has become read-only",
    errno.EIO: "its disk has failed",
    errno.ESTALE: "its file system has gone",
    errno.ENOTCONN: "its file system has gone",
    errno.ENODEV: "its file system has gone",
}
NUMBER = re.compile(r"os error (\d+)|\[Errno (\d+)\]")
"""Of an error of the system in the message of another library, as safetensors' and Arrow's."""
UNFINISHED = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|file write failed")
"""What PyTorch says when a file could not be written, without the reason."""


def storage_fault(error: BaseException, run_dir: Path) -> str | None:
    """Return in one line that the disk of a run failed and how to continue; None if an exception has another reason."""
    if not run_dir.is_dir():
        return f"the run directory {os.path.relpath(run_dir)} has been removed, and its checkpoints with it"
    what = next((found for each in chain(error) if (found := fault_of(each))), None)
    if what is None:
        return None
    left = [folder.name for folder in checkpoints(run_dir)]
    continues = (
        f"train.resume_from_checkpoint=auto then continues from {left[0]}" if left else "no checkpoint was complete yet"
    )
    free = f"{shutil.disk_usage(run_dir).free / GB:.1f} GiB free"
    return f"cannot write to {os.path.relpath(run_dir)}: {what} ({free}); mend that, {continues}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it came from."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def fault_of(error: BaseException) -> str | None:
    """Return what an exception says of the disk, in words; None if nothing."""
    numbers = [int(found[1] or found[2]) for found in NUMBER.finditer(str(error))]
    if isinstance(error, OSError) and error.errno:
        numbers.append(error.errno)
    for number in numbers:
        if number in FAULTS:
            return FAULTS[number]
    return "a file could not be written to its end; perhaps its disk is full" if UNFINISHED.search(str(error)) else None
