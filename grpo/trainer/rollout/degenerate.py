"""Completions that repeat themselves or are gibberish: they are skipped, and counted.

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
from trl.trainer.utils import pad

NGRAM = 4
"""Tokens of a repeated part."""


@dataclass
class Degenerate:
    """Finds degenerate completions of the rollouts at hand."""

    max_repetition: float | None
    """Largest fraction of n-grams of tokens that have occurred before in their completion."""
    max_entropy: float | None
    """Largest mean entropy of the policy at the tokens of a completion, nats; at the temperature of sampling."""
    skipped: list[bool] = field(default_factory=list, init=False)
    """Which completions of this process are skipped, of the rollouts at hand."""
    counts: dict[str, list[int]] = field(default_factory=dict, init=False)
    """Found completions of this process in a step by kind, and how many there were."""

    def find(self, trainer: Any, prompts: list[list[int]], completions: list[list[int]], masks: Any) -> None:
        """Look at completions before they are scored.

        Args:
            trainer: an `ExactGRPOTrainer`.
            prompts: tokens.
            completions: likewise.
            masks: of each completion 1 for tokens of the policy, 0 for those of tools; None without tools.
        """
        masks = masks or [[1] * len(tokens) for tokens in completions]
        found: dict[str, list[bool]] = {}
        if self.max_repetition is not None:
            own = [list(compress(*of)) for of in zip(completions, masks, strict=True)]
            found["repetitive"] = [repetition(tokens) > self.max_repetition for tokens in own]
        if self.max_entropy is not None:
            found["gibberish"] = [mean > self.max_entropy for mean in entropies(trainer, prompts, completions, masks)]
        self.skipped = [any(reasons) for reasons in zip(*found.values(), strict=True)]
        self.add({name: [sum(values), len(values)] for name, values in found.items()})

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


def entropies(
    trainer: Any, prompts: list[list[int]], completions: list[list[int]], masks: list[list[int]]
) -> list[float]:
    """Return the mean entropy of the policy at the tokens of each completion that are its own, nats."""

    def padded(rows: list[list[int]], side: str, value: int) -> torch.Tensor:
        tensors = [torch.tensor(row) for row in rows]
        return pad(tensors, value, padding_side=side).to(trainer.accelerator.device)

    filler = trainer._tokenizer.pad_token_id
    ids = torch.cat((padded(prompts, "left", filler), padded(completions, "right", filler)), 1)
    ones = [[[1] * len(row) for row in rows] for rows in (prompts, completions)]
    attention = torch.cat((padded(ones[0], "left", 0), padded(ones[1], "right", 0)), 1)
    own = padded(masks, "right", 0)
    how = {"batch_size": trainer.args.per_device_train_batch_size, "compute_entropy": True}
    with torch.no_grad():
        _, found, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, own.size(1), **how)
    return ((found * own).sum(1) / own.sum(1).clamp(min=1)).tolist()
