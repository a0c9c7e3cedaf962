"""Rollouts in flight: a server makes them for later steps, by the policy of then, while the policy trains.

Rank 0 makes them for all processes, each batch of a step in a thread of its own: completions, tool calls and rewards.
A step takes the oldest batch that is finished. TRL's importance-sampling correction makes up for the updates in
between: the log-probabilities are those of the policy that sampled each token.
"""

import functools
import logging
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from statistics import mean
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather, gather_object

from grpo.trainer import trl
from grpo.trainer.measurements import MemoryReadings, StepClock
from grpo.trainer.processes import LocalAccelerator
from grpo.trainer.rollout.columns import as_tensors, from_tensors
from grpo.trainer.rollout.completion import Completion, Group, Row
from grpo.trainer.rollout.dynamic_sampling import DynamicSampling, begin_step, groups_in
from grpo.trainer.rollout.engine_check import EVERY, EngineCheck
from grpo.trainer.rollout.sampling import Sampled, Source, groups_of, rows_of
from grpo.trainer.rollout.tool_calls import parsed
from grpo.utils.patching import patched

log = logging.getLogger(__name__)
PATIENCE = 30
"""Seconds that the end of a training waits for rewards and tools, which end after it."""
COLLECTIVE = {
    "trl.trainer.grpo_trainer:gather": gather,
    "trl.generation.vllm_generation:gather_object": gather_object,
    "trl.generation.vllm_generation:broadcast_object_list": broadcast_object_list,
}
"""Functions of TRL's rollouts for which all processes wait."""
_here = threading.local()
Scored = list[tuple[Group, bool]]


class AloneAccelerator(LocalAccelerator):
    """The accelerator of a process that generates for all."""

    num_processes, process_index, is_main_process = 1, 0, True


@dataclass
class Belongings:
    """Names that rollouts in progress use and change; each has values of its own."""

    processing_class: Any
    """Tokenizers of the tokenizers library refuse to be used by two threads."""
    environments: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """TRL's pool of instances by the name of the environment."""


@dataclass
class Made:
    """Finished rollouts, and the metrics that their rewards have logged."""

    groups: Scored
    metrics: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Begun:
    """Rollouts of some problems."""

    problems: list[int]
    policy: int
    """Number of updates of the policy when they began."""
    name: str = field(default_factory=lambda: f"rollouts-{uuid.uuid4().hex}")
    """Name of their requests to the engine."""
    rollouts: Future[Made] = field(default_factory=Future)

    def is_finished(self) -> bool:
        return self.rollouts.done() and self.rollouts.exception() is None

    def can_be_saved(self) -> bool:
        """Return whether it is finished, without images, which a checkpoint does not hold."""
        return self.is_finished() and not any(
            completion.images for group, _ in self.rollouts.result().groups for completion in group
        )


class AsyncRollouts(Source):
    """Batches of rollouts that have begun and that no step has learned from.

    Args:
        staleness: largest number of updates between the policy that begins a rollout and the one that learns from it.
        sampling: chooses the problems.
        engine_check: compares the engine with the policy at some steps.
    """

    def __init__(self, staleness: int, sampling: DynamicSampling, engine_check: EngineCheck) -> None:
        super().__init__(sampling.stream)
        self.staleness, self.sampling, self.engine_check = staleness, sampling, engine_check
        self.pending = 0
        """Number of batches."""
        self.first: int | None = None
        """Smallest number of a problem of theirs; None without any."""
        self._dropped = 0
        """Completions of a step that were too old."""
        self._begun: list[Begun] = []
        self._again = deque[list[int]]()
        """Problems whose rollouts were too old, or lost with a checkpoint: they begin again."""
        self._belongings: list[Belongings] = []
        """Those that no rollouts use at the moment."""

    def sample(self, trainer: Any, rows: list[Row]) -> Sampled:
        """Return the completions of a step; a collective call.

        Args:
            trainer: an `ExactGRPOTrainer`.
            rows: of the data loader, of which only their number counts.
        """
        if self.stream:
            self.stream.release(self.sampling.order.taken if self.first is None else self.first)
        with trainer.clock.of("generate"), trainer.memory.of("generate"):
            completions, metrics = self.fill(trainer, groups_in(trainer, rows))
        return completions, begin_step(trainer, self, completions, metrics)

    def has_taken_all(self, args: Any) -> bool:
        """Return whether all problems of all epochs have been taken, and none is pending."""
        return not self.pending and self.sampling.has_taken_all(args)

    def fill(self, trainer: Any, wanted: int) -> tuple[list[Completion], dict[str, float]]:
        """Return the completions of a step, of all processes, and their metrics; a collective call.

        Args:
            trainer: an `ExactGRPOTrainer`.
            wanted: groups in the batch.

        Raises:
            GenerationError: the engine failed, now or in a thread.
        """
        trl.load_engine(trainer)
        shared = list[Any]([None])
        if trainer.accelerator.is_main_process:
            self._dropped = 0
            completions, metrics = self.sampling.fill(wanted, partial(self._take, trainer, wanted))
            pending = [*(begun.problems for begun in self._begun), *self._again]
            first = min((problem for problems in pending for problem in problems), default=None)
            metrics |= {"rollout/dropped": self._dropped, **ages(trainer.state.global_step, completions)}
            shared = [(completions, metrics, len(pending), first, self.sampling.order.state_dict())]
        broadcast_object_list(shared)
        completions, metrics, self.pending, self.first, order = shared[0]
        if not trainer.accelerator.is_main_process:
            self.sampling.order.load_state_dict(order)
        return completions, metrics

    def _take(self, trainer: Any, size: int, _: int) -> Scored:
        """Return the oldest finished batch; begin as many as may be in flight."""
        step = trainer.state.global_step
        for stale in [begun for begun in self._begun if step - begun.policy > self.staleness]:
            trainer.vllm_generation.abort(stale.name)
            self._begun.remove(stale)
            self._again.append(stale.problems)
            self._dropped += len(stale.problems) * trainer.num_generations
        while len(self._begun) < self._most(trainer):
            problems = self._again.popleft() if self._again else self.sampling.order.take(size)
            self._begun.append(self._begin(trainer, problems))
        oldest = self._next(step)
        self._begun.remove(oldest)
        rollouts = oldest.rollouts.result()
        for name, values in rollouts.metrics.items():
            trl.log_metric(trainer, name, values)
        return rollouts.groups

    def _next(self, step: int) -> Begun:
        """Return the oldest batch of those that are finished; without any, wait for one that would soon be too old."""
        if not any(begun.rollouts.done() for begun in self._begun):
            last = [begun.rollouts for begun in self._begun if step - begun.policy == self.staleness]
            wait(last[:1] or [begun.rollouts for begun in self._begun], return_when=FIRST_COMPLETED)
        return next(begun for begun in self._begun if begun.rollouts.done())

    def _most(self, trainer: Any) -> int:
        """Return how many batches may be in flight now, with that of this step.

        A step that compares the engine with the policy has to learn from completions of that policy.
        """
        step, compared = trainer.state.global_step, self.engine_check.next
        stale = any(begun.policy < step for begun in self._begun)
        if (step >= compared and stale) or self.sampling.has_taken_all(trainer.args):
            return max(1, len(self._begun))
        last = min(trainer.state.max_steps, step + EVERY if step >= compared else compared)
        return 1 + int(max(0, min(self.staleness, last - 1 - step)))

    def _begin(self, trainer: Any, problems: list[int]) -> Begun:
        belongings = self._belongings.pop() if self._belongings else Belongings(deepcopy(trainer.processing_class))
        begun = Begun(problems, trainer.state.global_step)
        sampler = alone(trainer, belongings, begun.name)
        rows = rows_of(sampler, problems, trainer.num_generations)  # now: the data may be read by this thread alone

        def work() -> None:
            _here.alone = True
            try:
                groups = groups_of(sampler, problems, rows)
                begun.rollouts.set_result(Made(groups, trl.logged_metrics(sampler)))
            except BaseException as error:  # for the thread that waits for them
                begun.rollouts.set_exception(error)
            finally:
                self._belongings.append(belongings)

        threading.Thread(target=work, name=begun.name, daemon=True).start()
        return begun

    def stop(self, trainer: Any) -> None:
        """Have the engine make nothing more, and wait for what it has begun; finished batches stay for a checkpoint."""
        for begun in self._begun:
            if not begun.is_finished():
                with suppress(Exception):  # of an engine that is gone
                    trainer.vllm_generation.abort(begun.name)
        wait([begun.rollouts for begun in self._begun], timeout=PATIENCE)

    @contextmanager
    def ahead(self, trainer: Any) -> Iterator[None]:
        """While inside, rollouts may be in flight; none are before and afterwards."""
        self.reset()
        wait_for_nobody_in_threads()
        try:
            yield
        finally:
            self.stop(trainer)

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
                finished.append(saved(begun))
            else:
                again.append(begun.problems)
        pending = {"finished": finished, "again": again, "pending": (self.pending, self.first)}
        return self.sampling.state_dict() | {"in_flight": pending}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned; a run without rollouts in flight has none of these."""
        self.sampling.load_state_dict(state)
        if (pending := state.get("in_flight")) is None:
            return
        self.reset()
        self._begun = [loaded(finished) for finished in pending["finished"]]
        self._again.extend(pending["again"])
        self.pending, self.first = pending["pending"]
        if lost := sum(map(len, self._again)):
            finished_problems = sum(len(begun.problems) for begun in self._begun)
            log.warning(
                "the rollouts of %d problems were in flight at the checkpoint and begin again; %d more were finished",
                lost,
                finished_problems,
            )


def ages(step: int, completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean and the largest number of updates since the completions of a step began."""
    updates = [step - completion.policy for completion in completions]
    return {"sampling/staleness": mean(updates), "sampling/staleness/max": float(max(updates))}


def saved(begun: Begun) -> dict[str, Any]:
    """Return finished rollouts as `torch.load` takes them with `weights_only`."""
    rollouts = begun.rollouts.result()
    rows = [as_tensors(completion) for completion in chain.from_iterable(group for group, _ in rollouts.groups)]
    groups = [(len(group), equal) for group, equal in rollouts.groups]
    origin = {"policy": begun.policy, "problems": begun.problems}
    return origin | {"groups": groups, "completions": rows, "metrics": rollouts.metrics}


def loaded(state: dict[str, Any]) -> Begun:
    """Return what `saved` was given."""
    rest = (from_tensors(row | {"policy": state["policy"]}) for row in state["completions"])
    groups = [([next(rest) for _ in range(size)], equal) for size, equal in state["groups"]]
    begun = Begun(state["problems"], state["policy"])
    begun.rollouts.set_result(Made(groups, state["metrics"]))
    return begun


@functools.cache
def wait_for_nobody_in_threads() -> ExitStack:
    """Have `COLLECTIVE` functions return this process's own values in threads that make rollouts.

    For the rest of the process: such a thread may outlive its training. TRL's parser of tool calls is replaced for all
    threads, too, as each would put back what it has found. The replacements end with what is returned, which is kept.
    """

    def in_thread(stock: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, *args, **options: (
            value if getattr(_here, "alone", False) else stock(value, *args, **options)
        )

    stack = ExitStack()
    for name, stock in COLLECTIVE.items():
        stack.enter_context(patched(name, in_thread(stock)))
    stack.enter_context(trl.parses_by(parsed))
    return stack


def alone(trainer: Any, belongings: Belongings, name: str) -> Any:
    """Return a copy of a trainer whose rollouts change nothing of the trainer.

    Args:
        trainer: an `ExactGRPOTrainer`, with the options of sampling that the rollouts shall have.
        belongings: of these rollouts.
        name: by which the engine knows their requests.
    """
    accelerator = AloneAccelerator(trainer.accelerator)
    sampler = trl.detached(trainer, accelerator, belongings.processing_class, belongings.environments)
    sampler.vllm_generation = trainer.vllm_generation.for_thread(accelerator, name)
    sampler.clock, sampler.memory = StepClock(torch.device("cpu")), MemoryReadings(on_gpu=False)
    sampler.rollouts = replace(trainer.rollouts, completer=trainer.rollouts.completer.in_thread())
    return sampler
