"""Which of the processes of a machine has failed first, and which have only ended for it."""

import signal
from collections.abc import Mapping
from typing import Any

from grpo.utils.distributed import LOST_STATUS

STOPPED = 130
"""Exit status of a stopped run."""
SIGTERM_TO_SIGKILL = 30
"""Seconds that torchelastic gives the processes of a machine after a process has failed; it has no option."""
FOR_OTHERS = (LOST_STATUS, STOPPED, -signal.SIGTERM)
"""Exit statuses of processes that did not fail by themselves."""


def first_cause(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Return rank and failure of the process that failed first, of a result of torchelastic.

    A killed process reports nothing, and the others lose their connections to it. They then get SIGTERM, and SIGKILL if
    SIGTERM does not end them.
    """
    first = min(failure.timestamp for failure in failures.values())

    def order(item: tuple[int, Any]) -> tuple[int, int]:
        code, seconds = item[1].exitcode, item[1].timestamp - first
        ended_for_it = code == -signal.SIGTERM or (code == -signal.SIGKILL and seconds >= SIGTERM_TO_SIGKILL - 1)
        priority = 0 if code < 0 else 1 if code != LOST_STATUS else 2
        return 3 if ended_for_it else priority, item[1].timestamp

    return min(failures.items(), key=order)
