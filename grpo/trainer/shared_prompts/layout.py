"""Rows with equal prompts as groups of one sequence: each prompt once, then its completions.

    prompt A but its last token | last token, completion 1 | last token, completion 2 | prompt B … | last token, …

A completion's part begins with the prompt's last token, because that predicts its first one, and ends before its own
last token, which predicts nothing. Nothing is padded. A prompt attends to itself, a completion to its prompt and to
itself (`grpo/trainer/shared_prompts/attention.py`), and its positions continue where the prompt ends.
"""

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from grpo.trainer.batch import FIELDS, Batch, by_row
from grpo.trainer.microbatch import PromptGroup
from grpo.utils.device import sent


class Group(NamedTuple):
    """A prompt and its completions, in consecutive tokens of the sequence."""

    start: int
    """Index of the prompt's first token."""
    prompt: int
    """Tokens of the prompt but the last one."""
    completions: tuple[int, ...]
    """Tokens of each completion's part."""

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + self.prompt + sum(self.completions)


class Packed(NamedTuple):
    """A sequence of T tokens for B rows of P + C tokens, of which N are completions' tokens without padding."""

    groups: tuple[Group, ...]
    """All T tokens belong to one of these."""
    first: list[int]
    """The first row of each group."""
    source: torch.Tensor
    """Where each token stands in the rows, among B x (P + C), (1, T)."""
    position_ids: torch.Tensor
    """(1, T)"""
    scored: torch.Tensor
    """Where the predictions of completions' tokens are, among T, (N)."""
    targets: torch.Tensor
    """Where these tokens stand in the rows, among B x (P + C), (N)."""
    places: torch.Tensor
    """Where these tokens stand in the completions, among B x C, (N)."""


def pack_rows(
    groups: Sequence[PromptGroup], padded: int, width: int, device: torch.device, with_last: bool = False
) -> Packed:
    """Lay out rows in groups, of which each has one prompt. Nothing is read from the device.

    Args:
        groups: all rows, whose prompts are padded on the left and whose completions are padded on the right.
        padded: P, tokens of a prompt with padding.
        width: C, tokens of a completion with padding.
        device: of the tokens.
        with_last: whether the parts end with the last tokens of the completions, which routers see.
    """
    sequence: list[Group] = []
    source, positions, scored, targets, places = (list[range]() for _ in range(5))
    row = total = 0
    first = []
    for prompt, completions in groups:
        first.append(row)
        lengths = tuple(length + with_last for length in completions)
        sequence.append(Group(total, prompt - 1, lengths))
        last = row * (padded + width) + padded - 1  # of the prompt
        source.append(range(last - prompt + 1, last))
        positions.append(range(prompt - 1))
        total += prompt - 1
        for length, tokens in zip(completions, lengths, strict=True):
            last = row * (padded + width) + padded - 1
            source.append(range(last, last + tokens))
            positions.append(range(prompt - 1, prompt - 1 + tokens))
            scored.append(range(total, total + length))
            targets.append(range(last + 1, last + 1 + length))
            places.append(range(row * width, row * width + length))
            total += tokens
            row += 1
    values = [
        torch.cat([torch.arange(part.start, part.stop) for part in parts])
        for parts in (source, positions, scored, targets, places)
    ]
    sent_values = sent([values[0][None], values[1][None], *values[2:]], device)
    return Packed(tuple(sequence), first, *sent_values)


def groups_of(sizes: Sequence[int], prompt_mask: torch.Tensor, mask: torch.Tensor) -> tuple[PromptGroup, ...]:
    """Return rows as groups of so many consecutive ones that share a prompt; both masks are (rows, tokens)."""
    prompts, completions = prompt_mask.sum(1).tolist(), mask.sum(1).tolist()
    ends = list(accumulate(sizes))
    return tuple(
        PromptGroup(prompts[end - size], tuple(completions[end - size : end]))
        for size, end in zip(sizes, ends, strict=True)
    )


def prompt_keys(batch: Batch) -> list[Hashable]:
    """Return of each row of a batch what is equal for rows with equal prompts, their images included."""
    keys = real_tokens(batch["prompt_ids"], batch["prompt_mask"])
    names = [name for name in batch if FIELDS[name].of == "images"]
    if not names:
        return list(keys)
    split = by_row(batch)
    values = [[split[name][row] for name in names] for row in range(len(keys))]
    known: dict[Hashable, list[int]] = {}  # rows with different images, of each text
    pairs: list[Hashable] = []
    for row, key in enumerate(keys):
        others = known.setdefault(key, [])
        equal = next((other for other in others if all(map(are_equal, values[other], values[row]))), row)
        if equal == row:
            others.append(row)
        pairs.append((key, equal))
    return pairs


def are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal; of images of other processes, rows with equal prompts have the same tensor."""
    return tensor is other or torch.equal(tensor, other)


def real_tokens(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
    """Return each row's tokens without padding."""
    return [tuple(row[keep].tolist()) for row, keep in zip(ids.cpu(), mask.cpu() != 0, strict=True)]
