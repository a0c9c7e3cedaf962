"""A copy of a trainer that makes rollouts in a thread of rank 0, while all processes train."""

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather, gather_object

from grpo.generation.at_once import AtOnce
from grpo.trainer.measurements import MemoryReadings, StepClock
from grpo.trainer.processes import LocalAccelerator
from grpo.trainer.rollout.degenerate import Degenerate
from grpo.utils.patching import patched

COLLECTIVE = {
    "trl.trainer.grpo_trainer:gather": gather,
    "trl.generation.vllm_generation:gather_object": gather_object,
    "trl.generation.vllm_generation:broadcast_object_list": broadcast_object_list,
}
"""Functions of TRL's rollouts for which all processes wait."""
_here = threading.local()


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


@contextmanager
def own_values() -> Iterator[None]:
    """While inside, `COLLECTIVE` functions return this process's own values in threads that are `marked`."""

    def in_thread(stock: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, *given, **options: (
            value if getattr(_here, "alone", False) else stock(value, *given, **options)
        )

    with ExitStack() as stack:
        for name, stock in COLLECTIVE.items():
            stack.enter_context(patched(name, in_thread(stock)))
        yield


def mark() -> None:
    """Have this thread wait for no other process; see `own_values`."""
    _here.alone = True


def alone(trainer: Any, own: Belongings, name: str) -> Any:
    """Return a copy of a trainer whose rollouts change nothing of the trainer.

    Args:
        trainer: an `ExactGRPOTrainer`, with the options of sampling that the rollouts shall have.
        own: of these rollouts.
        name: by which the engine knows their requests.
    """
    one, rollouts, cpu = copy.copy(trainer), trainer.rollouts, torch.device("cpu")
    one.accelerator = AloneAccelerator(trainer.accelerator)
    one.model = SimpleNamespace(training=True, config=trainer.model.config)  # also while the policy is evaluated
    one.state = copy.copy(trainer.state)
    one._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    one._pending_extra_logs, one._pending_metrics = defaultdict(list), defaultdict(list)
    one.processing_class = own.processing_class
    one._tokenizer = getattr(own.processing_class, "tokenizer", own.processing_class)
    one._environment_pool = own.environments
    one.vllm_generation = trainer.vllm_generation.for_thread(one.accelerator, name)
    one.rollouts = replace(
        rollouts,
        clock=StepClock(cpu),
        memory=MemoryReadings(on_gpu=False),
        at_once=AtOnce(None),
        degenerate=rollouts.degenerate and Degenerate(rollouts.degenerate.max_repetition),
        sampling=None,
        in_flight=None,
        filtered=None,
        numbered=False,
    )
    return one
