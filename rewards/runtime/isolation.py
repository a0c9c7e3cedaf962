"""Reward functions in processes of their own: none hangs, crashes or freezes a run, and none fails in silence.

A call that goes wrong is made again row by row, so that one bad row costs only itself: its reward is None, the trainer
leaves it out, and the row and the traceback are kept. A function that does not come back is killed.
"""

import asyncio
import json
import logging
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rewards.runtime.call import Fault, Outcome
from rewards.runtime.process import Worker
from rewards.text import printable

log = logging.getLogger(__name__)
HOPELESS = 5  # batches in a row without a single reward after which a run is stopped
HUNG_ROWS = 3  # after so many in a batch the function is given up for the rest of it
NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments")
SIMPLE = bool | int | float | str | None  # of the trainer's state, what a reward in another process gets


class RewardError(RuntimeError):
    """A reward function failed where that is to stop the run; the message is one line."""


class Reward:
    """A reward function that can only fail row by row; `as_function` is what TRL gets.

    Args:
        fn: `package.module.function`, `path/to/file.py:function` or an entry point; see `rewards.runtime.loader.load`.
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
        self.faulted: list[int] = []
        """The rows of the last call that were left out because the function failed on them."""
        source = Path(fn.rpartition(":")[0])
        written = source.stat().st_mtime_ns if source.is_file() else None

        def start() -> Worker:
            if written and source.stat().st_mtime_ns != written:
                raise RewardError(f"reward.{name}: {source} has been changed since the run began; start it again")
            return Worker(fn, name, kwargs or {}, output)

        self._start = start
        self._workers = [self._start() for _ in range(workers)]
        self.needs = self._workers[0].needs
        """The arguments without which it cannot be called."""
        self._hopeless = 0
        self._pool = ThreadPoolExecutor(workers, f"reward-{name}")
        self._closed = False

    def as_function(self) -> Callable[..., Coroutine[Any, Any, list[float | None]]]:
        """Return an async function with TRL's signature: TRL runs those at the same time."""

        async def reward(**columns: Any) -> list[float | None]:
            return await asyncio.to_thread(self.score, **columns)

        reward.__name__ = self.name
        reward.isolated = self  # type: ignore[attr-defined]
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
            if column not in columns:  # these are kept already
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
            if self._workers[worker].process.poll() is not None and not self._closed:
                self._workers[worker] = self._start()
            arguments = {key: [values[row] for row in rows] for key, values in columns.items()}
            return self._workers[worker].call({**arguments, "trainer_state": state}, self.timeout)

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
        logged = dict.fromkeys(column for one in alone for column, _ in one.extra)
        nothing = [(column, [None]) for column in logged]
        scored = join([Outcome([None], {0: one.failed}, extra=nothing) if one.failed else one for one in alone])
        scored.failed = together.failed
        return scored

    def _note(self, outcome: Outcome, columns: dict[str, Any]) -> None:
        """Count what went wrong, keep the first row of each kind, and stop the run if that is wanted."""
        self.faulted = sorted(outcome.faults)
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
            told = printable("\n".join(f"{key}: {textwrap.shorten(str(value), 300)}" for key, value in content.items()))
            log.error("reward.%s failed on %s: %s\n%s\n%s", self.name, rows, fault.message, fault.traceback, told)
            if self.errors_file:
                kept = {"reward": self.name, **asdict(fault), "row": content}
                with self.errors_file.open("a") as file:
                    file.write(json.dumps(kept, default=str) + "\n")
        where = f"; the row is in {os.path.relpath(self.errors_file)}" if self.errors_file else ""
        if found and self.on_error == "raise":
            raise RewardError(f"reward.{self.name}: {found[0][1].message}{where}")
        self._hopeless = self._hopeless + 1 if len(outcome.faults) == len(outcome.rewards) else 0
        if self._hopeless == HOPELESS:
            what = f"failed on every completion of {HOPELESS} batches in a row"
            raise RewardError(f"reward.{self.name}: {what}: {found[0][1].message}{where}")

    def close(self) -> None:
        """End the processes, and with them the calls under way."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown(cancel_futures=True)


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
