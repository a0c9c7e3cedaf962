"""The micro-batches of a step, dealt out over the processes so that none waits for another."""

from collections.abc import Sequence

SPLITS = (1, 2, 3, 4)
"""Micro-batches per process that are tried where the token budget allows fewer."""


def limits(tokens: int, processes: int, budget: int) -> list[int]:
    """Return token budgets to try for a step: the given one, and those that give each process a few micro-batches.

    Args:
        tokens: of the micro-batches of the step.
        processes: that share them.
        budget: tokens that a micro-batch may have.
    """
    smaller = {-(-tokens // (processes * split)) for split in SPLITS}
    return sorted({budget, *(limit for limit in smaller if 0 < limit < budget)}, reverse=True)


def deal(costs: Sequence[float], processes: int, in_rounds: bool) -> list[list[int]]:
    """Deal out micro-batches, the most expensive first, each to the process with the least to do.

    This ends at most a third later than the best division would (R. L. Graham, Bounds on multiprocessing timing
    anomalies, 1969).

    Args:
        costs: of the micro-batches.
        processes: number of processes.
        in_rounds: whether processes meet at each micro-batch, as with sharded weights. Then a round has one for each.

    Returns:
        Indices of the micro-batches of each process.
    """
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    if in_rounds:
        return [order[process::processes] for process in range(processes)]
    dealt: list[list[int]] = [[] for _ in range(processes)]
    load = [0.0] * processes
    for index in order:
        process = load.index(min(load))
        dealt[process].append(index)
        load[process] += costs[index]
    return dealt


def earliest(divisions: Sequence[Sequence[float]], processes: int, in_rounds: bool) -> tuple[int, list[list[int]]]:
    """Return which division of a step into micro-batches ends first, and how it is dealt out.

    Args:
        divisions: the costs of the micro-batches of each.
    """
    dealt = [deal(costs, processes, in_rounds) for costs in divisions]
    chosen = min(range(len(divisions)), key=lambda place: duration(divisions[place], dealt[place], in_rounds))
    return chosen, dealt[chosen]


def duration(costs: Sequence[float], dealt: Sequence[Sequence[int]], in_rounds: bool) -> float:
    """Return the cost at which the last process ends: of the slowest, or of the slowest in each round."""
    if not in_rounds:
        return max(sum(costs[index] for index in indices) for indices in dealt)
    rounds = max(map(len, dealt))
    return sum(max(costs[indices[turn]] for indices in dealt if turn < len(indices)) for turn in range(rounds))
