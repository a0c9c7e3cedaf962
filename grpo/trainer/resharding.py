"""The states of the processes of a run as those of another number of processes."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo.trainer.batch import Batch, padded_alike

State = dict[str, Any]
"""See `grpo.trainer.resume.Resume.state_dict`."""


def resharded(states: Sequence[State], rank: int, processes: int) -> State:
    """Return the state of a process among `processes` from those of all processes of a checkpoint.

    A limit on what is computed at once is the lowest of all. Everything else but the completions of a generation is
    the same on each process.
    """
    first, buffers = states[0], [state["buffer"] for state in states]
    limits = [state["rollouts"].get("completions_at_once") for state in states]
    rollouts = first["rollouts"] | {"completions_at_once": min(filter(None, limits), default=None)}
    if rank and rollouts.get("in_flight"):  # rank 0 has them
        rollouts["in_flight"] = rollouts["in_flight"] | {"finished": [], "again": []}
    most_careful = min(states, key=lambda state: state["step_update"]["budget"]["tokens"])
    return first | {
        "rollouts": rollouts,
        "step_update": most_careful["step_update"],
        "step": first["step"] * len(states) // processes if buffers[0] else 0,  # 0, as any beginning of a generation
        "buffer": dealt(buffers, rank, processes) if buffers[0] else None,
        "unlogged": (fmean(state["unlogged"][0] for state in states), first["unlogged"][1]),
    }


def dealt(buffers: Sequence[Sequence[Batch]], rank: int, processes: int) -> list[Batch]:
    """Return the slices that a process gets of a generation, so that each step has the same slices as before.

    Args:
        buffers: the slices of each process, in the order of the steps.
    """
    slices = padded_alike([part for at_once in zip(*buffers, strict=True) for part in at_once])
    return slices[rank::processes]
