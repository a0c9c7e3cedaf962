"""Reward functions in processes of their own: none hangs, crashes or freezes a run, and none fails in silence.

A call that goes wrong is made again row by row, so that one bad row costs only itself: its reward is None, which TRL
leaves out, and the row and the traceback are kept. A function that does not come back is killed.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rewards.call import Fault, Outcome

log = logging.getLogger(__name__)
START = 300.0  # seconds that an import may take
HUNG_ROWS = 3  # after so many in a batch the function is given up for the rest of it
NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments")
SIMPLE = bool | int | float | str | None  # of the trainer's state, what a reward in another process gets


class RewardError(RuntimeError):
    """A reward function failed where that is to stop the run; the message is one line."""


class Worker:
    """A process with one reward function in it.

    Raises:
        ValueError: the function cannot be loaded; one line says why.
    """

    def __init__(self, fn: str, name: str, kwargs: dict[str, Any], output: Any = None) -> None:
        mine, theirs = socket.socketpair()
        self.traceback = os.memfd_create("traceback")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rewards.worker", str(theirs.fileno()), str(self.traceback)],
            pass_fds=[theirs.fileno(), self.traceback],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        theirs.close()
        self.connection = Connection(mine.detach())
        self.connection.send((fn, name, kwargs))
        self.needs: list[str] = []
        problem: str | None = f"reward.{name}.fn={fn}: its process ended while it was imported"
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll(START):
                problem, self.needs = self.connection.recv()
            else:
                problem = f"reward.{name}.fn={fn}: not imported after {START:.0f} s"
        if problem is not None:
            self.stop()
            raise ValueError(problem)

    def call(self, arguments: dict[str, Any], timeout: float) -> Outcome:
        """Call the function; whatever it does, an outcome comes back in time."""
        try:
            self.connection.send((arguments, timeout))
            if self.connection.poll(timeout + 1):
                return self.connection.recv()
        except (EOFError, OSError):  # its watchdog has ended it, or it has ended itself
            pass
        except Exception as error:
            return Outcome(failed=Fault(type(error).__name__, f"its arguments cannot be sent: {error}"))
        where = os.pread(self.traceback, 10_000, 0).decode(errors="replace")
        self.stop()
        if where or self.process.returncode == -signal.SIGKILL:
            return Outcome(failed=Fault("Timeout", f"took longer than timeout={timeout:g} s and was stopped", where))
        return Outcome(failed=Fault("Died", f"ended its process with status {self.process.returncode}"))

    def stop(self) -> None:
        """End the process and whatever it has started."""
        if self.connection.closed:
            return
        self.connection.close()
        os.close(self.traceback)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Reward:
    """A reward function that can only fail row by row; `as_function` is what TRL gets.

    Args:
        fn: `package.module.function`, `path/to/file.py:function` or an entry point; see `rewards.loader.load`.
        name: under which it is logged.
        kwargs: passed at every call.
        timeout: seconds that a call, with all rows or with one, may take.
        on_error: `skip` makes a bad row None, `raise` ends the run with the row saved.
        workers: how many processes share the rows of a call; rows of the same prompt stay together.
        errors_file: where the first row of each kind of error is kept, as JSON lines.
        output: what the function prints goes there; None is this process's own output.

    Raises:
        ValueError: the function cannot be loaded; one line says which file, which line, and why.
    """

    def __init__(
        self,
        fn: str,
        name: str,
        kwargs: dict[str, Any] | None = None,
        timeout: float = 60.0,
        on_error: str = "skip",
        workers: int = 1,
        errors_file: Path | None = None,
        output: Any = None,
    ) -> None:
        self.name, self.timeout, self.on_error, self.errors_file = name, timeout, on_error, errors_file
        self.errors: Counter[str] = Counter()
        """How many rows of each kind of error were left out, over all calls."""
        self._start = lambda: Worker(fn, name, kwargs or {}, output)
        self._workers = [self._start() for _ in range(workers)]
        self.needs = self._workers[0].needs
        """The columns of the data without which it cannot be called."""
        self._pool = ThreadPoolExecutor(workers, f"reward-{name}")

    def as_function(self) -> Callable[..., Coroutine[Any, Any, list[float | None]]]:
        """Return an async function with TRL's signature: TRL runs those at the same time."""

        async def reward(**columns: Any) -> list[float | None]:
            return await asyncio.to_thread(self.score, **columns)

        reward.__name__ = self.name
        return reward

    def score(self, **columns: Any) -> list[float | None]:
        """Return one reward for each completion, None where there is none.

        Raises:
            RewardError: a row failed, and `on_error` is `raise`.
        """
        state, log_extra, log_metric, _ = (columns.pop(key, None) for key in NOT_COLUMNS)
        simple = {key: value for key, value in vars(state).items() if isinstance(value, SIMPLE)} if state else {}
        parts = shares(columns.get("prompts") or columns["completions"], len(self._workers))
        jobs = [
            self._pool.submit(self._score_part, worker, columns, part, SimpleNamespace(**simple))
            for worker, part in enumerate(parts)
        ]
        outcome = join([job.result() for job in jobs])
        for column, values in outcome.extra if log_extra else ():
            log_extra(column, values)
        for metric, value in outcome.metrics if log_metric else ():
            log_metric(metric, value)
        if log_metric:
            log_metric(f"rewards/{self.name}/errors", float(len(outcome.faults) or bool(outcome.failed)))
        self._note(outcome, columns)
        return outcome.rewards

    def _score_part(self, worker: int, columns: dict[str, Any], part: range, state: SimpleNamespace) -> Outcome:
        """Score some rows in one worker: together, and if that fails, one by one."""

        def call(rows: Sequence[int]) -> Outcome:
            arguments = {key: [values[row] for row in rows] for key, values in columns.items()}
            outcome = self._workers[worker].call({**arguments, "trainer_state": state}, self.timeout)
            if self._workers[worker].process.poll() is not None:
                self._workers[worker] = self._start()
            return outcome

        together = call(part)
        if not together.failed:
            return together
        alone: list[Outcome] = []
        for row in part:
            hung = [one.failed is not None and one.failed.kind == "Timeout" for one in alone[-HUNG_ROWS:]]
            if len(part) == 1:
                one = together
            elif hung == [True] * HUNG_ROWS:
                one = Outcome(failed=Fault("Timeout", f"not called, since it hung on the {HUNG_ROWS} rows before"))
            else:
                one = call([row])
            alone.append(one)
        scored = join([Outcome([None], {0: one.failed}) if one.failed else one for one in alone])
        scored.failed = together.failed
        return scored

    def _note(self, outcome: Outcome, columns: dict[str, Any]) -> None:
        """Count what went wrong, keep the first row of each kind, and stop the run if that is wanted."""
        found = list(outcome.faults.items())
        if outcome.failed and not found:
            found = [(0, outcome.failed)]
        for row, fault in found:
            self.errors[fault.kind] += 1
            if self.errors[fault.kind] > 1:
                continue
            content = {key: values[row] for key, values in columns.items()}
            rows = (
                "one completion" if outcome.faults else f"{len(outcome.rewards)} completions at once, not on each alone"
            )
            told = "\n".join(f"{key}: {textwrap.shorten(str(value), 300)}" for key, value in content.items())
            log.error("reward.%s failed on %s: %s\n%s\n%s", self.name, rows, fault.message, fault.traceback, told)
            if self.errors_file:
                kept = {"reward": self.name, **asdict(fault), "row": content}
                with self.errors_file.open("a") as file:
                    file.write(json.dumps(kept, default=str) + "\n")
        if found and self.on_error == "raise":
            where = f"; the row is in {os.path.relpath(self.errors_file)}" if self.errors_file else ""
            raise RewardError(f"reward.{self.name}: {found[0][1].message}{where}")

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()
        for worker in self._workers:
            worker.stop()


def shares(prompts: Sequence[Any], count: int) -> list[range]:
    """Divide rows into at most `count` runs of about equal length; neighbours with the same prompt stay together."""
    starts = [row for row in range(len(prompts)) if row == 0 or prompts[row] != prompts[row - 1]]
    ends = [*starts[1:], len(prompts)]
    cuts = [len(starts) * part // count for part in range(count + 1)]
    return [range(starts[low], ends[high - 1]) for low, high in pairwise(cuts) if low < high]


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """Put the outcomes of consecutive rows together."""
    whole = Outcome()
    for one in outcomes:
        whole.faults |= {len(whole.rewards) + row: fault for row, fault in one.faults.items()}
        whole.rewards += one.rewards
        whole.extra += one.extra
        whole.metrics += one.metrics
        whole.failed = whole.failed or one.failed
    return whole
