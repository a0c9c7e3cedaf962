"""A disk that is full, read-only or gone, recognised whatever library has met it."""

import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from grpo.rundir.resume import checkpoints
from grpo.utils.limits import GB

AUTO = "train.resume_from_checkpoint=auto"
LIBRARIES = ("safetensors", "pyarrow")
FAULTS = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "its file system has become read-only",
    errno.EIO: "its disk has failed",
    **dict.fromkeys((errno.ESTALE, errno.ENOTCONN, errno.ENODEV), "its file system has gone"),
}
NUMBER = re.compile(r"(?:os error|\[Errno) (\d+)")
"""Of an error of the system in the message of another library, as safetensors' and Arrow's."""
UNFINISHED = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|file write failed")
"""What PyTorch says when a file could not be written, without the reason."""
UNOPENED = "open file failed with strerror: "
"""What it says, with the reason, when a file could not be opened."""


def storage_fault(error: BaseException, run_dir: Path) -> str | None:
    """Return in one line that the disk of a run failed and how to continue; None if an exception has another reason."""
    name = os.path.relpath(run_dir)
    try:
        if not run_dir.is_dir():
            return f"the run directory {name} has been removed, and its checkpoints with it"
        what = next((found for each in chain(error) if (found := fault_of(each, run_dir))), None)
        if what is None:
            return None
        left, free = checkpoints(run_dir), shutil.disk_usage(run_dir).free / GB
    except OSError as worse:
        return f"the run directory {name} cannot be reached: {worse.strerror}"
    continues = f"{AUTO} then continues from {left[0].name}" if left else "no checkpoint was complete yet"
    return f"cannot write to {name}: {what} ({free:.1f} GiB free); mend that, {continues}"


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and those that it came from."""
    while error:
        yield error
        error = error.__cause__ or error.__context__


def fault_of(error: BaseException, run_dir: Path) -> str | None:
    """Return what an exception says of the disk of a run, in words; None if nothing, or of another disk."""
    if isinstance(error, OSError):
        file = error.filename
        if isinstance(file, str | Path) and not Path(file).absolute().is_relative_to(run_dir.absolute()):
            return None
        return FAULTS.get(error.errno or 0) or fault_of_text(str(error))
    # of libraries written in other languages; any other exception may repeat what somebody else's disk has said
    is_pytorchs = isinstance(error, RuntimeError) and (UNFINISHED.search(str(error)) or UNOPENED in str(error))
    return fault_of_text(str(error)) if is_pytorchs or type(error).__module__.startswith(LIBRARIES) else None


def fault_of_text(text: str) -> str | None:
    """Return what the message of a library says of the disk, in words; None if nothing."""
    for number in NUMBER.findall(text):
        if int(number) in FAULTS:
            return FAULTS[int(number)]
    for number, words in FAULTS.items():
        if f"{UNOPENED}{os.strerror(number)}" in text:
            return words
    return "a file could not be written to its end; perhaps its disk is full" if UNFINISHED.search(text) else None
