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
    """A sequence of T tokens for B rows with C completion tokens at the most."""

    groups: tuple[Group, ...]
    """All T tokens belong to one of these."""
    first: list[int]
    """The first row of each group."""
    source: torch.Tensor
    """Where each token stands in the rows, among B x (P + C), (1, T)."""
    position_ids: torch.Tensor
    """(1, T)"""
    labels: torch.Tensor
    """The token that each token predicts, -100 where that is none of a completion, (1, T)."""
    index: torch.Tensor
    """Where the prediction of each completion token is, among T, (B, C)."""


def pack_rows(
    sizes: Sequence[int], prompt_mask: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, with_last: bool = False
) -> Packed:
    """Lay out rows in groups, of which each has one prompt.

    Args:
        sizes: number of consecutive rows in each group.
        prompt_mask: of prompts padded on the left, (B, P).
        ids: completions padded on the right, (B, C).
        mask: of the completions, (B, C).
        with_last: whether the parts end with the last tokens of the completions, which routers see.
    """
    prompts, completions = prompt_mask.sum(1).tolist(), (mask.sum(1) + with_last).tolist()
    width, padded = ids.size(1), prompt_mask.size(1)
    groups: list[Group] = []
    source, positions, starts, total = list[range](), list[range](), list[int](), 0
    first = [end - size for size, end in zip(sizes, accumulate(sizes), strict=True)]
    for row in range(len(ids)):
        last_of_prompt = row * (padded + width) + padded - 1
        if row in first:
            groups.append(Group(total, prompts[row] - 1, ()))
            source.append(range(last_of_prompt - prompts[row] + 1, last_of_prompt))
            positions.append(range(prompts[row] - 1))
            total += prompts[row] - 1
        starts.append(total)
        source.append(range(last_of_prompt, last_of_prompt + completions[row]))
        positions.append(range(prompts[row] - 1, prompts[row] - 1 + completions[row]))
        total += completions[row]
        groups[-1] = groups[-1]._replace(completions=(*groups[-1].completions, completions[row]))
    device = ids.device
    within = torch.arange(width, device=device)
    index = (torch.tensor(starts, device=device)[:, None] + within).clamp(max=total - 1)
    labels = torch.full((1, total), -100, device=device)
    labels[0, index[mask != 0]] = ids[mask != 0]
    where, position_ids = (
        torch.cat([torch.arange(part.start, part.stop) for part in parts])[None].to(device)
        for parts in (source, positions)
    )
    return Packed(tuple(groups), first, where, position_ids, labels, index)


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
