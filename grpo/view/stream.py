"""Problems that are read while the run runs: a data set that does not fit a disk, or has no end."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from grpo.utils.errors import ConfigError

NUMBER = "number"
"""Column of a data set that has the numbers of a stream's problems instead of the problems."""
Counts = dict[str, int]
Prepare = Callable[[Dataset, int], tuple[Dataset, Counts]]
"""From rows, and the place of the first one in the stream, to the usable problems, and the counts of both."""


@dataclass
class Buffer:
    """The usable problems of some successive rows of a stream."""

    first: int
    """Number of its first problem."""
    problems: Dataset
    order: list[int]
    """The row in `problems` of each of its numbers."""
    epoch: int
    counts: Counts
    """Counts of all rows so far, those of this buffer included."""
    state: dict[str, Any]
    """From which it can be read again."""


class Stream:
    """Problems by their numbers, 0, 1, 2 and so on without an end: after its last row the stream begins again.

    A thread reads a buffer of rows ahead, filters them, and shuffles those that are left. The problem of a number
    depends on the data, the size of the buffer and the seed alone, so that any number of processes, and a run that
    resumes, get the same. A buffer is kept until `release`.

    Args:
        source: the rows.
        prepare: adds prompts, and filters.
        size: rows of a buffer.
        seed: of the order within a buffer; None for the order of the rows.
        where: the data, for messages.
        skip: rows at the beginning that are held out.

    Raises:
        ConfigError: rows cannot be read or prepared, or none of an epoch is usable.
    """

    def __init__(
        self, source: IterableDataset, prepare: Prepare, size: int, seed: int | None, where: str, skip: int = 0
    ) -> None:
        self.source = source.skip(skip) if skip else source
        self.prepare, self.size, self.seed, self.where, self.skip = prepare, size, seed, where, skip
        self.counts: Counts = {}
        """Counts of the rows of all buffers that were used."""
        self._columns: list[str] = []
        self._thread = ThreadPoolExecutor(1, "stream")
        self._buffers = deque[Buffer]()
        self._begin({"rows": None, "row": 0, "epoch": 0, "number": 0, "buffers": 0, "found": False, "counts": {}})
        self.column_names: list[str] = self._last().problems.column_names

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a problem; the thread reads up to it."""
        while number >= self._end:
            self._advance()
        for buffer in self._buffers:
            if 0 <= number - buffer.first < len(buffer.order):
                return buffer.problems[buffer.order[number - buffer.first]]
        raise IndexError(f"problem {number} has been released")

    def up_to(self, limit: int) -> int:
        """Return how many problems the first epoch has, or `limit` if it has more; nothing may have been released."""
        while self._end < limit and self._last().epoch == 0:
            self._advance()
        return min(limit, sum(len(buffer.order) for buffer in self._buffers if buffer.epoch == 0))

    def beginning(self, limit: int) -> Dataset:
        """Return the first problems of the first epoch; nothing may have been released."""
        return Dataset.from_list([self[number] for number in range(self.up_to(limit))])

    def release(self, number: int) -> None:
        """Forget the problems before a number, a buffer at a time."""
        while len(self._buffers) > 1 and self._buffers[1].first <= number:
            self._buffers.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return where the oldest buffer that is kept begins, in numbers and texts."""
        self._last()  # there is none yet right after `load_state_dict`
        return self._buffers[0].state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        wait([self._next])  # of which nothing is used
        self._buffers.clear()
        self._begin(state)

    @property
    def _end(self) -> int:
        return self._last().first + len(self._last().order)

    def _last(self) -> Buffer:
        if not self._buffers:
            self._advance()
        return self._buffers[-1]

    def _begin(self, state: dict[str, Any]) -> None:
        self._state = state
        self.source.set_epoch(state["epoch"])
        if state["rows"]:
            self.source.load_state_dict(state["rows"])
        self._rows: Iterator[dict[str, list[Any]]] = self.source.iter(self.size)
        self._next: Future[Buffer] = self._thread.submit(self._read)

    def _advance(self) -> None:
        """Take the buffer that the thread has read, and have it read the next one."""
        self._buffers.append(self._next.result())
        self.counts.update(self._buffers[-1].counts)
        self._next = self._thread.submit(self._read)

    # What follows runs in the thread, one call at a time

    def _read(self) -> Buffer:
        """Return the next buffer that has a problem."""
        state = self._state
        while True:
            at, counts = self._state, self._state["counts"]
            rows = self._take(at)
            if rows is None:
                self._end_epoch(at)
                continue
            problems, added = self.prepare(rows, self.skip + at["row"])
            counts = {name: counts.get(name, 0) + number for name, number in added.items()}
            self._state = {
                "rows": self.source.state_dict(),
                "row": at["row"] + added["rows"],
                "epoch": at["epoch"],
                "number": at["number"] + len(problems),
                "buffers": at["buffers"] + 1,
                "found": at["found"] or len(problems) > 0,
                "counts": counts,
            }
            if len(problems):
                order = list(range(len(problems)))
                if self.seed is not None:
                    random.Random(f"{self.seed} {at['buffers']}").shuffle(order)
                return Buffer(at["number"], problems, order, at["epoch"], counts, state)

    def _take(self, at: dict[str, Any]) -> Dataset | None:
        """Return the next rows, with the columns of the first ones; None after the last row."""
        try:
            rows = next(self._rows, None)
            if rows is None:
                return None
            number = len(next(iter(rows.values())))
            self._columns = self._columns or list(rows)
            columns = {name: rows.get(name, [None] * number) for name in self._columns}
            return Dataset.from_dict(columns, self.source.features)
        except Exception as error:
            reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
            raise ConfigError(f"{self.where}: behind row {self.skip + at['row']:,}: {reason}") from error

    def _end_epoch(self, at: dict[str, Any]) -> None:
        """Begin the stream again."""
        if not at["row"]:
            held_out = f"behind the {self.skip} that are held out; task.eval.size=0 trains on all"
            raise ConfigError(f"{self.where}: there are no rows {held_out if self.skip else 'in it'}")
        if not at["found"]:
            why = ", ".join(f"{name} {number}" for name, number in at["counts"].items() if number)
            raise ConfigError(f"{self.where}: none of its rows can be trained on ({why})")
        self._state = at | {"rows": None, "row": 0, "epoch": at["epoch"] + 1, "found": False}
        self.source.set_epoch(at["epoch"] + 1)
        self._rows = self.source.iter(self.size)
