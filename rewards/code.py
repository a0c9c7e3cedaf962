"""1 for a completion whose Python code passes the row's tests, 0 for any other.

The code runs in a sandbox of bubblewrap, and the tests in another: see `rewards/sandbox/` and docs/more_rewards.md.
"""

import re
from collections.abc import Sequence
from typing import Any

from rewards.sandbox import bubblewrap
from rewards.sandbox.verdict import in_parallel, verdict
from rewards.text import text_of

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def code(
    completions: Sequence[Any],
    tests: Sequence[Any],
    entry_point: Sequence[str | None] | None = None,
    seconds: float = 5.0,
    memory_mb: int = 512,
    sandbox: str = "bubblewrap",
    **columns: Any,
) -> list[float | Exception]:
    """Run the last fenced block of each completion, or the whole completion without a block, and then its tests.

    A row with unusable tests gets an error, and so does one that the machine was too busy for, twice.

    Args:
        tests: Python statements of each row, or lists of them, that raise an exception if the code is incorrect.
        entry_point: name of each row's function, for tests that define `check`, and where Python has that name too.
        seconds: limit on the wall time of a completion with its tests, seconds.
        memory_mb: limit on the address space of the code and on that of the tests, MiB.
        sandbox: `bubblewrap`, or `none` to run the code with your rights.
    """
    programs = [(FENCED.findall(text_of(completion)) or [text_of(completion)])[-1] for completion in completions]
    statements = [test if isinstance(test, str) else "\n".join(test) for test in tests]
    names = entry_point or [None] * len(programs)

    def score(row: int) -> float | Exception:
        return verdict(programs[row], statements[row], names[row], seconds, memory_mb, sandbox != "none")

    return in_parallel(score, len(programs))


def check(sandbox: str = "bubblewrap", **kwargs: Any) -> None:
    """Raise ValueError, with a line, if the sandbox is unknown or cannot run here; called before the run."""
    if sandbox not in ("bubblewrap", "none"):
        raise ValueError(f"kwargs.sandbox={sandbox}: there are bubblewrap and none")
    if sandbox == "bubblewrap":
        bubblewrap.check()


code.check = check  # type: ignore[attr-defined]
