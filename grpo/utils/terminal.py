"""The terminal of a command: it may go away at any time, which ends no run."""

import contextlib
import io
import os
import signal
import sys
from typing import Any

from rich.console import Console

STREAMS = {1: "stdout", 2: "stderr"}
"""Names in `sys` by file descriptor."""


class Lasting(io.FileIO):
    """A terminal, a pipe or a file that takes everything, also once it is closed, gone or full."""

    def write(self, data: Any, /) -> int:
        """Write what can be written, and return the size of all of it."""
        with contextlib.suppress(OSError):
            written = super().write(data)
            return len(data) if written is None else written  # None: it would have to wait
        return len(data)


def keep(*descriptors: int) -> None:
    """Let writing to stdout, 1, or stderr, 2, never raise; a stream that somebody has replaced, as tests do, stays.

    A descriptor that was closed before the start, as by `2>&-`, is opened: else a file would get its number.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    for descriptor in descriptors:
        name = STREAMS[descriptor]
        before = getattr(sys, f"__{name}__")
        if getattr(sys, name) is before:
            raw, encoding = Lasting(descriptor, "w", closefd=False), before.encoding if before else "utf-8"
            buffer = io.BufferedWriter(raw)
            stream = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=True, write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def plain_console(**options: Any) -> Console:
    """Return a console that prints text as it is: without markup, which a model may have written, or colored numbers.

    Args:
        options: of `rich.console.Console`.
    """
    return Console(markup=False, highlight=False, **options)


def on_signals(numbers: tuple[signal.Signals, ...], handler: Any) -> dict[signal.Signals, Any]:
    """Set a handler for signals and return those before; a signal that is ignored stays so, as `nohup` wants it."""
    heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def say(line: str) -> None:
    """Print a line on stderr from within a signal handler, where nothing with a lock or a buffer may be called."""
    with contextlib.suppress(OSError):
        os.write(2, (f"\n{line}\n\n" if os.isatty(2) else f"{line}\n").encode())  # above the progress
