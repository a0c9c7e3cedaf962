"""Work before the first step: a line with what is under way and for how long, and afterwards how long parts took."""

import time
from itertools import pairwise
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

LONG = 5.0
"""Seconds from which a line says afterwards how long it took."""


class Waiting:
    """While inside, a terminal shows what is under way and for how many seconds.

    Afterwards a line has the seconds of its parts, unless it was short or has none.

    Args:
        doing: the work, as in `loading libraries`.
    """

    def __init__(self, console: Console, doing: str) -> None:
        self.console, self.doing = console, doing
        self.parts: list[tuple[str, float]] = []
        """Parts of the work, and when each began."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        self.line = Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,  # what the libraries print goes to the log
            redirect_stderr=False,
        )

    def __enter__(self) -> "Waiting":
        self.started = time.monotonic()
        self.task = self.line.add_task(self.doing, total=None)
        self.line.start()
        return self

    def begin(self, part: str) -> None:
        """Show a part of the work, which begins."""
        self.parts.append((part, time.monotonic()))
        self.line.update(self.task, description=f"{self.doing}: {part}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line.stop()
        now = time.monotonic()
        if error is None and self.parts and now - self.started >= LONG:
            parts = [f"{part} {end - begun:.0f} s" for (part, begun), (_, end) in pairwise([*self.parts, ("", now)])]
            line = f"{self.doing} took {now - self.started:.0f} s ({', '.join(parts)})"
            self.console.print(line, soft_wrap=True)
