"""Rollouts in flight: a server makes them for later steps, by the policy of then, while the policy trains.

Rank 0 makes them for all processes, each batch of a step in a thread of its own: completions, tool calls and rewards.
A step takes the oldest batch that is finished. TRL's importance-sampling correction makes up for the updates in
between: the log-probabilities are those of the policy that sampled each token.
"""

import logging
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import mean
from threading import Thread
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from grpo.generation.kept_tokens import KeptLogprob
from grpo.trainer.rollout.alone import Belongings, alone, mark
from grpo.trainer.rollout.columns import from_tensor, to_tensor
from grpo.trainer.rollout.engine_check import EVERY
from grpo.trainer.rollout.sampling import Completion, Group, groups_of, rows_of

log = logging.getLogger(__name__)
PATIENCE = 30
"""Seconds that the end of a training waits for rewards and tools, which end after it."""
Scored = list[tuple[Group, bool]]


@dataclass
class Made:
    """Finished rollouts, and what they add to the metrics of their step."""

    groups: Scored
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Metrics that rewards have logged."""
    degenerate: dict[str, list[int]] = field(default_factory=dict)
    """As `Degenerate` counts them."""
    dropped: int = 0
    """Completions that were too old."""


@dataclass
class Begun:
    """Rollouts of some problems."""

    problems: list[int]
    policy: int
    """Number of updates of the policy when they began."""
    name: str = field(default_factory=lambda: f"rollouts-{uuid.uuid4().hex}")
    """Name of their requests to the engine."""
    made: Future[Made] = field(default_factory=Future)

    def is_finished(self) -> bool:
        return self.made.done() and self.made.exception() is None

    def can_be_saved(self) -> bool:
        """Return whether it is finished, without images, which a checkpoint does not hold."""
        return self.is_finished() and not any(
            completion.images for group, _ in self.made.result().groups for completion in group
        )


class InFlight:
    """Batches of rollouts that have begun and that no step has learned from.

    Args:
        staleness: largest number of updates between the policy that begins a rollout and the one that learns from it.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self.pending = 0
        """Number of batches."""
        self.first: int | None = None
        """Smallest number of a problem of theirs; None without any."""
        self.is_fresh = True
        """Whether the policy has made the rollouts of this step since its last update."""
        self._begun: list[Begun] = []
        self._again = deque[list[int]]()
        """Problems whose rollouts were too old, or lost with a checkpoint: they begin again."""
        self._belongings: list[Belongings] = []
        """Those that no rollouts use at the moment."""

    def fill(self, trainer: Any, wanted: int) -> tuple[list[Completion], dict[str, float]]:
        """Return the completions of a step, of all processes, and their metrics; a collective call.

        Args:
            trainer: an `ExactGRPOTrainer`.
            wanted: groups in the batch.

        Raises:
            GenerationError: the engine failed, now or in a thread.
        """
        if trainer.state.global_step != trainer._last_loaded_step:
            trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = trainer.state.global_step
        sampling, found = trainer.rollouts.sampling, list[Any]([None])
        if trainer.accelerator.is_main_process:
            notes = Made([])
            kept, metrics = sampling.fill(wanted, partial(self._take, trainer, wanted, notes))
            pending = [*(begun.problems for begun in self._begun), *self._again]
            first = min((problem for problems in pending for problem in problems), default=None)
            metrics |= {"rollout/dropped": notes.dropped, **ages(trainer.state.global_step, kept)}
            found = [(kept, metrics, notes, (len(pending), first, sampling.order.state_dict()))]
        broadcast_object_list(found)
        kept, metrics, notes, (self.pending, self.first, order) = found[0]
        self.is_fresh = metrics["sampling/staleness"] == 0
        if trainer.accelerator.is_main_process:
            for name, values in notes.metrics.items():
                trainer._pending_metrics[name] += values
        else:
            sampling.order.load_state_dict(order)
            notes.degenerate = {name: [0, 0] for name in notes.degenerate}
        if trainer.rollouts.degenerate:
            trainer.rollouts.degenerate.add(notes.degenerate)
        return kept, metrics

    def _take(self, trainer: Any, size: int, notes: Made, _: int) -> Scored:
        """Return the oldest finished batch; begin as many as may be in flight."""
        step = trainer.state.global_step
        for stale in [begun for begun in self._begun if step - begun.policy > self.staleness]:
            trainer.vllm_generation.abort(stale.name)
            self._begun.remove(stale)
            self._again.append(stale.problems)
            notes.dropped += len(stale.problems) * trainer.num_generations
        while len(self._begun) < self._most(trainer):
            problems = self._again.popleft() if self._again else trainer.rollouts.sampling.order.take(size)
            self._begun.append(self._begin(trainer, problems))
        one = self._next(step)
        self._begun.remove(one)
        made = one.made.result()
        for group, _ in made.groups:
            for completion in group:
                completion.policy = one.policy
        for name, values in made.metrics.items():
            notes.metrics.setdefault(name, []).extend(values)
        for name, counts in made.degenerate.items():
            notes.degenerate[name] = [
                sum(both) for both in zip(notes.degenerate.get(name, [0, 0]), counts, strict=True)
            ]
        return made.groups

    def _next(self, step: int) -> Begun:
        """Return the oldest batch of those that are finished; without any, wait for one that would soon be too old."""
        if not any(begun.made.done() for begun in self._begun):
            last = [begun.made for begun in self._begun if step - begun.policy == self.staleness]
            wait(last[:1] or [begun.made for begun in self._begun], return_when=FIRST_COMPLETED)
        return next(begun for begun in self._begun if begun.made.done())

    def _most(self, trainer: Any) -> int:
        """Return how many batches may be in flight now, with that of this step.

        A step that compares the engine with the policy has to learn from completions of that policy.
        """
        step, compared, args = trainer.state.global_step, trainer.rollouts.engine_check.next, trainer.args
        order, epochs = trainer.rollouts.sampling.order, args.num_train_epochs
        stale = any(begun.policy < step for begun in self._begun)
        if (step >= compared and stale) or (args.max_steps <= 0 and order.taken >= epochs * order.count):
            return max(1, len(self._begun))
        last = min(trainer.state.max_steps, step + EVERY if step >= compared else compared)
        return 1 + int(max(0, min(self.staleness, last - 1 - step)))

    def _begin(self, trainer: Any, problems: list[int]) -> Begun:
        own = self._belongings.pop() if self._belongings else Belongings(deepcopy(trainer.processing_class))
        begun = Begun(problems, trainer.state.global_step)
        one = alone(trainer, own, begun.name)
        rows = rows_of(one, problems, trainer.num_generations)  # now: the data may be read by this thread alone

        def work() -> None:
            mark()
            try:
                groups = groups_of(one, problems, rows)
                counts = one.rollouts.degenerate.counts if one.rollouts.degenerate else {}
                begun.made.set_result(Made(groups, dict(one._pending_metrics), counts))
            except BaseException as error:  # for the thread that waits for them
                begun.made.set_exception(error)
            finally:
                self._belongings.append(own)

        Thread(target=work, name=begun.name, daemon=True).start()
        return begun

    def stop(self, trainer: Any) -> None:
        """Have the engine make nothing more, and wait for what it has begun; finished batches stay for a checkpoint."""
        for begun in self._begun:
            if not begun.is_finished():
                with suppress(Exception):  # of an engine that is gone
                    trainer.vllm_generation.abort(begun.name)
        wait([begun.made for begun in self._begun], timeout=PATIENCE)

    def reset(self) -> None:
        """Forget what an earlier training has begun."""
        self._begun.clear()
        self._again.clear()
        self.pending, self.first = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return finished batches, and the problems of the others."""
        finished, again = list[dict[str, Any]](), [*self._again]
        for begun in self._begun:  # each is looked at once, as it may end in the meantime
            if begun.can_be_saved():
                finished.append({"policy": begun.policy, "problems": begun.problems} | saved(begun.made.result()))
            else:
                again.append(begun.problems)
        return {"finished": finished, "again": again, "pending": (self.pending, self.first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        self.reset()
        for finished in state["finished"]:
            begun = Begun(finished["problems"], finished["policy"])
            begun.made.set_result(loaded(finished))
            self._begun.append(begun)
        self._again.extend(state["again"])
        self.pending, self.first = state["pending"]
        if lost := sum(map(len, self._again)):
            finished_problems = sum(len(begun.problems) for begun in self._begun)
            log.warning(
                "the rollouts of %d problems were in flight at the checkpoint and begin again; %d more were finished",
                lost,
                finished_problems,
            )


def ages(step: int, kept: Sequence[Completion]) -> dict[str, float]:
    """Return the mean and the largest number of updates since the completions of a step began."""
    found = [step - completion.policy for completion in kept]
    return {"sampling/staleness": mean(found), "sampling/staleness/max": float(max(found))}


def saved(made: Made) -> dict[str, Any]:
    """Return finished rollouts as `torch.load` takes them with `weights_only`."""
    rows = []
    for completion in chain.from_iterable(group for group, _ in made.groups):
        logps = completion.logps and [value if value is None else float(value) for value in completion.logps]
        kept = completion.logps and [list(getattr(value, "kept", ())) for value in completion.logps]
        columns = {name: to_tensor([value]) for name, value in completion.columns.items()}  # one may be none of Arrow's
        rows.append(vars(completion) | {"logps": logps, "kept": kept, "columns": columns})
    groups = [(len(group), equal) for group, equal in made.groups]
    return {"groups": groups, "completions": rows, "metrics": made.metrics, "degenerate": made.degenerate}


def loaded(state: dict[str, Any]) -> Made:
    """Return what `saved` was given."""
    completions = []
    for row in state["completions"]:
        kept, columns = row.pop("kept"), row["columns"]
        if isinstance(columns, torch.Tensor):  # of version 0.2.0
            columns = from_tensor(columns)[0] or {}
        else:
            columns = {name: from_tensor(value)[0] for name, value in columns.items()}
        if kept and any(kept):
            both = zip(row["logps"], kept, strict=True)
            row["logps"] = [None if value is None else KeptLogprob(value, tokens) for value, tokens in both]
        completions.append(Completion(**row | {"columns": columns}))
    rest = iter(completions)
    groups = [([next(rest) for _ in range(size)], equal) for size, equal in state["groups"]]
    return Made(groups, state["metrics"], state["degenerate"])
