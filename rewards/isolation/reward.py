"""Reward functions in processes of their own: none hangs, crashes or freezes a run, and none fails silently.

A call that fails is repeated completion by completion, so that a bad completion costs only itself: its reward is None,
the trainer skips it, and the completion and the traceback are kept. A function that hangs is killed.
"""

import asyncio
import json
import logging
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rewards.isolation.call import Fault, Outcome
from rewards.isolation.loader import FROM_TRL, GROUP
from rewards.isolation.process import GRACE, Process, ask, has_ended
from rewards.isolation.system import file_without_name
from rewards.text import printable

log = logging.getLogger(__name__)
HOPELESS = 5
"""Consecutive batches without a reward after which the run is stopped."""
MAX_HUNG = 3
"""Consecutive completions, or groups, on which the function hangs before the rest of the batch is skipped."""
NOT_COLUMNS = ("trainer_state", "log_extra", "log_metric", "environments", "images")
"""Arguments from TRL that do not travel to the process of a function."""
SIMPLE = bool | int | float | str | None
"""Types of the fields of the trainer's state that a reward in another process gets."""


class RewardError(RuntimeError):
    """A failure of a reward function that stops the run; the message is a single line."""


class Reward:
    """A reward function whose failures affect single completions only; TRL gets `as_function`.

    Args:
        fn: `package.module.function`, `path/to/file.py:function` or an entry point; see `loader.load`.
        name: name in metrics and messages.
        kwargs: keyword arguments of every call.
        timeout: limit of a call, with all completions or with a single completion, seconds.
        on_error: `skip` makes the reward of a bad completion None, `raise` ends the run with the completion saved.
        workers: processes that share the completions of a call; completions of a prompt stay together.
        errors_file: JSON lines with the first completion of each kind of error; None keeps none.
        output: file for the output of the function; None is the output of this process.

    Raises:
        ValueError: the function cannot be loaded; a line with the file, the line number and the reason.
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
        """Number of skipped completions by kind of error, over all calls."""
        self.scored = 0
        """Number of completions that it did not fail on, over all calls."""
        self.fault = ""
        """The message of the last fault."""
        self.faulted: list[int] = []
        """Indices of the completions of the last call that were skipped because the function failed on them."""
        source = Path(fn.rpartition(":")[0])
        written = source.stat().st_mtime_ns if source.is_file() else None

        def start() -> Worker:
            if written and source.stat().st_mtime_ns != written:
                raise RewardError(f"reward.{name}: {source} has been changed since the run began; start it again")
            return Worker(fn, name, kwargs or {}, output)

        self._start = start
        self._workers = [self._start() for _ in range(workers)]
        self.needs: list[str] = self._workers[0].loaded
        """Arguments without which the function cannot be called."""
        self.compares = GROUP in self.needs
        """Whether the function compares the completions of a group, so that it is always called with whole groups."""
        self._hopeless = 0
        self._pool = ThreadPoolExecutor(workers, f"reward-{name}")
        self._closed = False

    def missing(self, columns: Iterable[str]) -> list[str]:
        """Return the arguments without which the function cannot be called and that neither TRL nor the data has."""
        return [name for name in self.needs if name not in (*columns, *FROM_TRL)]

    def as_function(self, tasks: Container[str] | None = None) -> Callable[..., Coroutine[Any, Any, list]]:
        """Return an async function with TRL's signature; TRL runs async functions concurrently.

        Args:
            tasks: values of the column `task` whose completions it scores, others get None; all if it is None.
        """

        async def reward(**columns: Any) -> list[float | None]:
            if tasks is None:
                return await asyncio.to_thread(self.score, **columns)
            rows = [row for row, task in enumerate(columns["task"]) if task in tasks]
            return await asyncio.to_thread(self._score_rows, rows, **columns)

        reward.__name__ = self.name
        reward.isolated = self  # type: ignore[attr-defined]
        return reward

    def _score_rows(self, rows: Sequence[int], **columns: Any) -> list[float | None]:
        """Return what `score` does for some completions, and None for the others."""
        count, log_extra = len(columns["completions"]), columns.get("log_extra")
        result: list[float | None] = [None] * count
        self.faulted = []
        if not rows:
            return result

        def log_some(column: str, values: Sequence[Any]) -> None:
            by_row = dict(zip(rows, values, strict=True))
            log_extra(column, [by_row.get(row) for row in range(count)])  # type: ignore[misc]

        selected = {
            name: [values[row] for row in rows] if isinstance(values, list) else values
            for name, values in columns.items()
        }
        scores = self.score(**selected | ({"log_extra": log_some} if log_extra else {}))
        for row, score in zip(rows, scores, strict=True):
            result[row] = score
        self.faulted = [rows[row] for row in self.faulted]
        return result

    def score(self, **columns: Any) -> list[float | None]:
        """Return a reward per completion; None for a completion without a reward.

        Raises:
            RewardError: a completion failed and `on_error` is `raise`, all completions of `HOPELESS` batches failed, or
                the function returns no list in its first call.
        """
        state, log_extra, log_metric, environments, _ = (columns.pop(key, None) for key in NOT_COLUMNS)
        if environments and "environments" in self.needs:
            columns["environments"] = [SimpleNamespace(**environment._state()) for environment in environments]
        simple = {key: value for key, value in vars(state).items() if isinstance(value, SIMPLE)} if state else {}
        alike = columns[GROUP] if self.compares else columns.get("prompts") or columns["completions"]
        parts = split_by_prompt(alike, len(self._workers))
        futures = [
            self._pool.submit(self._score_part, worker, columns, part, SimpleNamespace(**simple))
            for worker, part in enumerate(parts)
        ]
        outcome = join([future.result() for future in futures])
        for column, values in outcome.extra.items() if log_extra else ():
            if column not in columns:  # the trainer keeps these anyway
                log_extra(column, values)
        for metric, value in outcome.metrics if log_metric else ():
            log_metric(metric, value)
        if log_metric:
            log_metric(f"rewards/{self.name}/errors", float(len(outcome.faults) or bool(outcome.failed)))
        self._note(outcome, columns)
        return outcome.rewards

    def _score_part(self, worker: int, columns: dict[str, Any], part: range, state: SimpleNamespace) -> Outcome:
        """Score some completions in a worker: in a single call, and after a failure one by one, or group by group."""

        def call(rows: Sequence[int]) -> Outcome:
            if has_ended(self._workers[worker].process) and not self._closed:
                self._workers[worker].stop()
                self._workers[worker] = self._start()
            arguments = {key: [values[row] for row in rows] for key, values in columns.items()}
            return self._workers[worker].call({**arguments, "trainer_state": state}, self.timeout)

        at_once = call(part)
        if not at_once.failed:
            return at_once
        if at_once.failed.kind == "OneForAll" and not self.scored:  # it has never been right
            raise RewardError(f"reward.{self.name}: {at_once.failed.message}")
        alone: list[Outcome] = []
        hung = 0
        of_group = [columns[GROUP][row] for row in part] if self.compares else [*part]
        for rows in split_by_prompt(of_group, len(part)):
            if len(rows) == len(part):
                outcome = at_once
            elif hung >= MAX_HUNG:
                outcome = Outcome(failed=Fault("Timeout", f"not called: it hung on the {MAX_HUNG} calls before"))
            else:
                outcome = call([part[row] for row in rows])
            hung = hung + 1 if outcome.failed and outcome.failed.kind == "Timeout" else 0
            faults = {row: outcome.failed for row in range(len(rows)) if outcome.failed}
            alone.append(Outcome([None] * len(rows), faults) if faults else outcome)
        scored = join(alone)
        scored.failed = at_once.failed
        return scored

    def _note(self, outcome: Outcome, columns: dict[str, Any]) -> None:
        """Count the faults, keep the first completion of each kind, and stop the run if it has to be.

        Raises:
            RewardError: as for `score`.
        """
        self.faulted = sorted(outcome.faults)
        count = len(outcome.rewards)
        self.scored += count - len(self.faulted)
        faults = outcome.faults or ({0: outcome.failed} if outcome.failed else {})
        failed_on = "one completion" if outcome.faults else f"{count} completions at once, not on each alone"
        for row, fault in faults.items():
            self.errors[fault.kind] += 1
            self.fault = fault.message
            if self.errors[fault.kind] == 1:
                self._keep(fault, failed_on, {key: values[row] for key, values in columns.items()})
        if faults and self.on_error == "raise":
            raise RewardError(f"reward.{self.name}: {next(iter(faults.values())).message}{self._where()}")
        self._hopeless = self._hopeless + 1 if len(self.faulted) == count else 0
        if self._hopeless == HOPELESS:
            problem = f"failed on every completion of {HOPELESS} batches in a row"
            raise RewardError(f"reward.{self.name}: {problem}: {next(iter(faults.values())).message}{self._where()}")

    def _where(self) -> str:
        """Return the end of a message that says where the completion is: relative only within the current folder."""
        if not self.errors_file:
            return ""
        file = os.path.relpath(self.errors_file)
        return f"; the completion is in {os.path.abspath(file) if file.startswith('..') else file}"

    def _keep(self, fault: Fault, failed_on: str, row: dict[str, Any]) -> None:
        """Log a fault with the completion and its columns, and write it to the errors file."""
        lines = [f"{key}: {textwrap.shorten(str(value), 300)}" for key, value in row.items()]
        excerpt = printable("\n".join(lines))
        log.error("reward.%s failed on %s: %s\n%s\n%s", self.name, failed_on, fault.message, fault.traceback, excerpt)
        if self.errors_file:
            with self.errors_file.open("a") as file:
                file.write(json.dumps({"reward": self.name, **asdict(fault), "row": row}, default=str) + "\n")

    def close(self) -> None:
        """End the processes, and with them running calls."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
        self._pool.shutdown(cancel_futures=True)


class Worker(Process):
    """The process of a reward function; `loaded` are the arguments without which it cannot be called.

    Raises:
        ValueError: the function cannot be loaded.
    """

    def __init__(self, fn: str, name: str, kwargs: dict[str, Any], output: Any) -> None:
        self.traceback, place = file_without_name("traceback"), f"reward.{name}.fn={fn}"
        super().__init__("rewards.isolation.worker", (fn, name, kwargs), place, output, self.traceback)

    def call(self, arguments: dict[str, Any], timeout: float) -> Outcome:
        """Call the function and return the outcome, at the latest about a second after `timeout` seconds."""
        late = False
        try:
            return ask(self.connection, (timeout, arguments), timeout + GRACE)
        except TimeoutError:
            late = True
        except (EOFError, OSError):  # the watchdog has ended the process, or it has ended itself
            pass
        except Exception as error:
            return Outcome(failed=Fault(type(error).__name__, f"its arguments cannot be sent: {error}"))
        if self.connection.closed:
            return Outcome(failed=Fault("Died", "its process was ended"))
        where = os.pread(self.traceback, 10_000, 0).decode(errors="replace")
        self.stop()
        if late or where:
            return Outcome(failed=Fault("Timeout", f"took longer than timeout={timeout:g} s and was stopped", where))
        status = self.process.returncode
        ending = f"was killed by signal {-status}, perhaps out of memory" if status < 0 else f"status {status}"
        return Outcome(failed=Fault("Died", f"its process ended: {ending}"))


def split_by_prompt(prompts: Sequence[Any], count: int) -> list[range]:
    """Divide completions into at most `count` ranges of about equal length that split no run of the same prompt."""
    starts = [row for row in range(len(prompts)) if row == 0 or prompts[row] != prompts[row - 1]]
    ends = [*starts[1:], len(prompts)]
    cuts = [len(starts) * part // count for part in range(count + 1)]
    return [range(starts[low], ends[high - 1]) for low, high in pairwise(cuts) if low < high]


def join(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of consecutive completions; a column that some of them did not log is None there."""
    columns = dict.fromkeys(column for outcome in outcomes for column in outcome.extra)
    joined = Outcome(extra={column: [] for column in columns})
    for outcome in outcomes:
        for column, values in joined.extra.items():
            values += outcome.extra.get(column, [None] * len(outcome.rewards))
        joined.faults |= {len(joined.rewards) + row: fault for row, fault in outcome.faults.items()}
        joined.rewards += outcome.rewards
        joined.metrics += outcome.metrics
        joined.failed = joined.failed or outcome.failed
    return joined
