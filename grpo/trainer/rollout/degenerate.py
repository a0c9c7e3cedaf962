"""Completions that repeat themselves: they are skipped, and counted.

A skipped completion has no reward: it is neither in the mean and the deviation of its group nor in the policy loss, as
if its reward function had returned None in TRL. With a reward of 0 it would raise the advantages of the others; that is
a penalty, which a reward such as `repetition` gives. As for other completions without an advantage, a KL penalty and an
entropy bonus stay. The gradient is that of the policy among completions that are not degenerate.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import torch

NGRAM = 4
"""Tokens of a repeated part."""


@dataclass
class Degenerate:
    """Finds degenerate completions of the rollouts at hand."""

    max_repetition: float
    """Largest fraction of n-grams of tokens that have occurred before in their completion."""
    skipped: list[bool] = field(default_factory=list, init=False)
    """Which completions of this process are skipped, of the rollouts at hand."""
    counts: dict[str, list[int]] = field(default_factory=dict, init=False)
    """Found completions of this process in a step by kind, and how many there were."""

    def find(self, completions: list[list[int]], masks: Any) -> None:
        """Look at completions before they are scored.

        Args:
            completions: tokens.
            masks: of each completion 1 for tokens of the policy, 0 for those of tools; None without tools.
        """
        masks = masks or [[1] * len(tokens) for tokens in completions]
        own = [list(compress(*of)) for of in zip(completions, masks, strict=True)]
        self.skipped = [repetition(tokens) > self.max_repetition for tokens in own]
        self.add({"repetitive": [sum(self.skipped), len(self.skipped)]})

    def add(self, counts: dict[str, list[int]]) -> None:
        """Count completions that have been looked at."""
        for name, (found, every) in counts.items():
            before = self.counts.get(name, [0, 0])
            self.counts[name] = [before[0] + found, before[1] + every]

    def take_metrics(self, accelerator: Any) -> dict[str, float]:
        """Return the fractions of the completions since the last call, of all processes; a collective call."""
        metrics = {}
        for name, counts in self.counts.items():
            found, every = accelerator.reduce(torch.tensor(counts, device=accelerator.device), "sum").tolist()
            metrics[f"rollout/{name}"] = found / every
        self.counts.clear()
        return metrics


def repetition(tokens: Sequence[int]) -> float:
    """Return the fraction of the n-grams of a completion that have occurred in it before; 0 where it has none."""
    ngrams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
