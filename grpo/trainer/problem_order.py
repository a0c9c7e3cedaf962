"""The problems in the order of training, of which each step takes as many as it needs."""

import torch


class ProblemOrder:
    """TRL's order of the problems, one epoch after the other.

    Args:
        count: number of problems.
        seed: of the order.
        shuffle: whether each epoch has an order of its own.
    """

    def __init__(self, count: int, seed: int | None, shuffle: bool) -> None:
        self.count, self.seed, self.shuffle = count, seed or 0, shuffle
        self.taken = 0
        self._epoch, self._order = -1, list[int]()

    def take(self, number: int) -> list[int]:
        """Return the indices of the next problems."""
        found = [self._at(self.taken + ahead) for ahead in range(number)]
        self.taken += number
        return found

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
