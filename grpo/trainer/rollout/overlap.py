"""Generation by a vLLM server while the policy trains: the batches of the next step are drawn during the one before."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any


class Overlap:
    """The batches of an epoch, drawn one step ahead, and whether the next rollouts have begun.

    TRL's importance-sampling correction makes up for the one update in between: the log-probabilities of the
    completions are those of the policy that made them.
    """

    def __init__(self) -> None:
        self.begun = False
        """Whether the server makes the rollouts of the next step."""
        self._drawn = deque[Any]()
        self._source: Iterator | None = None

    def reset(self) -> None:
        """Forget what has been drawn and begun."""
        self._source, self.begun = None, False
        self._drawn.clear()

    def take(self, epoch: Iterator, number: int) -> list[Any]:
        """Return the batches of a step of an epoch, and draw those of the next one."""
        if epoch is not self._source:
            self._drawn.clear()
            self._source = epoch
        self._drawn.extend(islice(epoch, max(0, 2 * number - len(self._drawn))))
        return [self._drawn.popleft() for _ in range(min(number, len(self._drawn)))]

    def next_rows(self, step: int, end: float) -> list[dict[str, Any]] | None:
        """Return the rows whose rollouts can begin now; None if none can.

        Not over the end of an epoch.

        Args:
            step: at hand, from 0.
            end: the first step whose rollouts may not begin early: after the last one, or one that compares the engine
                with the policy, as it has to be the policy.
        """
        return self._drawn[0] if self._drawn and step + 1 < end else None

    def begin_next(self, trainer: Any, before: float) -> None:
        """Have the server begin the rollouts of the next step, if they can, and if it is before a step."""
        rows = self.next_rows(trainer.state.global_step, min(trainer.state.max_steps, before))
        self.begun = rows is not None
        if rows:
            rows = trainer.rollouts.read(trainer, rows)
            ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in rows])
            trainer.vllm_generation.begin(ids, trainer.num_generations)
