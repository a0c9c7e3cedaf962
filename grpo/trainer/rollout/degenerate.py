"""Completions that repeat themselves: they are skipped, and counted.

A skipped completion has no reward: it is neither in the mean and the deviation of its group nor in the policy loss, as
if its reward function had returned None in TRL. With a reward of 0 it would raise the advantages of the others; that is
a penalty, which a reward such as `repetition` gives. As for other completions without an advantage, a KL penalty and an
entropy bonus stay. The gradient is that of the policy among completions that are not degenerate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.rollout.stages import Stage

NGRAM = 4
"""Tokens of a repeated part."""


@dataclass
class Degenerate(Stage):
    """Takes the rewards of completions that repeat themselves, and logs their fraction as `rollout/repetitive`."""

    max_repetition: float
    """Largest fraction of n-grams of tokens that have occurred before in their completion."""

    def scored(self, trainer: Any, ids: list[list[int]], masks: list | None, rewards: torch.Tensor) -> None:
        """Replace the rewards of degenerate completions by NaN."""
        if not trainer.model.training:
            return
        by_policy = [list(compress(*pair)) for pair in zip(ids, masks, strict=True)] if masks else ids
        skipped = [repetition(tokens) > self.max_repetition for tokens in by_policy]
        trl.log_metric(trainer, "rollout/repetitive", list(map(float, skipped)))
        rewards[trainer.accelerator.gather(torch.tensor(skipped, device=rewards.device))] = torch.nan


def repetition(tokens: Sequence[int]) -> float:
    """Return the fraction of the n-grams of a completion that have occurred in it before; 0 where it has none."""
    ngrams = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
