"""The problems in the order of training, of which each step takes as many as it needs."""

from typing import Any

import torch

LEARNABLE = (0.2, 0.8)
"""Fraction of correct completions, from and to, of a problem that teaches."""
OTHERS = 0.25
"""How often other problems are taken, relative to these."""


class ProblemOrder:
    """TRL's order of the problems, one epoch after the other.

    Args:
        count: number of problems.
        seed: of the order.
        shuffle: whether each epoch has an order of its own.
        prioritize: whether problems that are solved or out of reach are passed over three times out of four.
    """

    def __init__(self, count: int, seed: int | None, shuffle: bool, prioritize: bool = False) -> None:
        self.count, self.seed, self.shuffle, self.prioritize = count, seed or 0, shuffle, prioritize
        self.taken = 0
        """Problems taken so far, those included that were passed over."""
        self.correct = dict[int, float]()
        """Fraction of correct completions of each problem, when it was last taken."""
        self._epoch, self._order = -1, list[int]()

    def take(self, number: int) -> list[int]:
        """Return the indices of the next problems."""
        problems = list[int]()
        while len(problems) < number:
            problem = self._at(self.taken)
            if not (self.prioritize and self._passes_over(problem)):
                problems.append(problem)
            self.taken += 1
        return problems

    def note(self, problem: int, correct: float) -> None:
        """Remember the fraction of correct completions of a problem."""
        self.correct[problem] = correct

    def counts(self) -> dict[str, int]:
        """Return how many of the problems taken so far are solved, learnable and out of reach."""
        low, high = LEARNABLE
        solved = sum(fraction > high for fraction in self.correct.values())
        learnable = sum(low <= fraction <= high for fraction in self.correct.values())
        return {"solved": solved, "learnable": learnable, "out_of_reach": len(self.correct) - learnable - solved}

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on."""
        return {"taken": self.taken, "correct": self.correct}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with what `state_dict` has returned."""
        self.taken, self.correct = state["taken"], state["correct"]

    def _passes_over(self, problem: int) -> bool:
        low, high = LEARNABLE
        if low <= self.correct.get(problem, low) <= high:
            return False
        drawn = torch.rand((), generator=torch.Generator().manual_seed(self.seed + 1_000_003 * (1 + self.taken)))
        return float(drawn) >= OTHERS

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self.count)
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed)
            for _ in range(epoch + 1):
                order = torch.randperm(self.count, generator=generator)
            self._epoch, self._order = epoch, order.tolist()
        return self._order[place]
