"""The problems of several tasks in the order of training: each step has prompts of each task by its weight."""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo.options import Mixture
from grpo.trainer.rollout.problem_order import ProblemOrder


class MixedOrder:
    """Problems of several tasks, each task in an order of its own, as `ProblemOrder` gives it.

    The next problem is of the task that is furthest behind its weight, so that of any number of successive problems
    each task has its portion, to less than one problem for two tasks. Nothing is drawn, and the order of each task
    follows from the seed.

    Args:
        tasks: the task of each problem of the data.
        weights: problems of each task, relative to those of the others.
        seed: of the order within each task.
        shuffle: as of `ProblemOrder`.
        prioritize: likewise, within each task.
    """

    def __init__(
        self, tasks: Sequence[str], weights: Mapping[str, float], seed: int | None, shuffle: bool, prioritize: bool
    ) -> None:
        self.tasks, total = tasks, sum(weights.values())
        self.portions = {name: weight / total for name, weight in weights.items() if weight}
        self.rows = {name: [row for row, task in enumerate(tasks) if task == name] for name in self.portions}
        self.place = {row: place for rows in self.rows.values() for place, row in enumerate(rows)}
        self.orders = {name: ProblemOrder(len(rows), seed, shuffle, prioritize) for name, rows in self.rows.items()}
        self.behind = dict.fromkeys(self.portions, 0.0)
        """Problems by which each task is behind its portion."""
        self.count = len(self.place)

    @property
    def taken(self) -> int:
        """Problems of all tasks taken so far, those included that were passed over."""
        return sum(order.taken for order in self.orders.values())

    def take(self, number: int) -> list[int]:
        """Return the indices of the next problems."""
        return [self._next() for _ in range(number)]

    def note(self, problem: int, correct: float) -> None:
        """Remember the fraction of correct completions of a problem."""
        self.orders[self.tasks[problem]].note(self.place[problem], correct)

    def counts(self) -> dict[str, int]:
        """Return how many of the problems taken so far are solved, learnable and out of reach."""
        each = [order.counts() for order in self.orders.values()]
        return {name: sum(count[name] for count in each) for name in each[0]}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        orders = {name: order.state_dict() for name, order in self.orders.items()}
        return {"behind": {**self.behind}, "orders": orders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        self.behind = state["behind"]
        for name, order in self.orders.items():
            order.load_state_dict(state["orders"][name])

    def _next(self) -> int:
        for name, portion in self.portions.items():
            self.behind[name] += portion
        chosen = max(self.behind, key=self.behind.__getitem__)
        self.behind[chosen] -= 1
        return self.rows[chosen][self.orders[chosen].take(1)[0]]


def order_of(
    data: Any, mixture: Mixture | None, seed: int | None, shuffle: bool, prioritize: bool
) -> MixedOrder | ProblemOrder:
    """Return the order of the problems of a data set: a `MixedOrder` for a mixture, else a `ProblemOrder`."""
    if mixture is None:
        return ProblemOrder(len(data), seed, shuffle, prioritize)
    return MixedOrder(data["task"][:], mixture.weights, seed, shuffle, prioritize)
