"""Batches as TRL's `GRPOTrainer` holds them: dictionaries of tensors, lists and scalars, one row per completion.

Prompts are padded on the left, completions on the right. The tensors of images (`pixel_values` and others) are
flat over images or tiles; `split_pixel_values_by_grid` makes one tensor per row of them, and its opposite joins these.
"""

from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from grpo.trainer.microbatch import Microbatch

PROMPT = ("prompt_ids", "prompt_mask")
COMPLETION = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "advantages",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
BOTH = ("token_type_ids", "mm_token_type_ids")
IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "image_position_ids",
)
COUNTS = ("num_images", "num_tiles")
"""Lists of how many images, and of how many of their tiles, each row has."""
NEUTRAL = {"importance_sampling_ratio": 1.0, "tool_mask": 1}
"""What keys are padded with so that padding changes nothing, where it is not 0: TRL's VESPO adds up the logarithms of
a row's ratios, those of its padding included."""
Batch = dict[str, Any]


def join(slices: Sequence[Batch]) -> Batch:
    """Return one batch of all rows of slices of one generation, which are padded alike."""
    if len(slices) == 1:
        return slices[0]
    parts = [split_pixel_values_by_grid(part) for part in slices]
    joined: Batch = {}
    for key, first in parts[0].items():
        if isinstance(first, list):
            joined[key] = [item for part in parts for item in part[key]]
        elif isinstance(first, torch.Tensor) and first.ndim:
            joined[key] = torch.cat([part[key] for part in parts])
        else:
            joined[key] = first
    return unsplit_pixel_values_by_grid(joined)


def pick(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch of these rows, with their images."""
    picked: Batch = {}
    for key, value in split_pixel_values_by_grid(batch).items():
        if isinstance(value, list):
            picked[key] = [value[row] for row in rows]
        elif isinstance(value, torch.Tensor) and value.ndim:
            picked[key] = value[torch.tensor(rows, device=value.device)]
        else:
            picked[key] = value
    picked = unsplit_pixel_values_by_grid(picked)
    if not any(picked.get("num_images") or [0]):
        picked = {key: value for key, value in picked.items() if key not in IMAGES}
    return picked


def trim(batch: Batch, prompt_length: int, completion_length: int) -> Batch:
    """Return the batch with prompts cut on the left and completions on the right to these lengths in tokens."""
    padded_prompt = batch["prompt_ids"].size(1)
    trimmed = dict(batch)
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.ndim != 2:
            continue
        if key in PROMPT:
            trimmed[key] = value[:, padded_prompt - prompt_length :]
        elif key in COMPLETION:
            trimmed[key] = value[:, :completion_length]
        elif key in BOTH:
            trimmed[key] = value[:, padded_prompt - prompt_length : padded_prompt + completion_length]
    return trimmed


def take(batch: Batch, part: Microbatch, multiple: int | None = None) -> Batch:
    """Return the rows of a micro-batch, trimmed to its lengths, or to the next `multiple` of tokens."""
    picked = pick(batch, part.rows)
    lengths = []
    for length, padded in ((part.prompt_length, "prompt_ids"), (part.completion_length, "completion_ids")):
        lengths.append(min(-(-length // (multiple or 1)) * (multiple or 1), picked[padded].size(1)))
    return trim(picked, *lengths)


def loss_mask(batch: Batch) -> torch.Tensor:
    """Return which completion tokens the loss counts, (rows, completion length)."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def lengths(batch: Batch) -> tuple[list[int], list[int]]:
    """Return the tokens of each row's prompt and of its completion, without padding."""
    return batch["prompt_mask"].sum(1).tolist(), batch["completion_mask"].sum(1).tolist()


def idle(batch: Batch) -> tuple[Batch, Microbatch]:
    """Return a cheap micro-batch of weight zero: a short prompt, with images if there are any, and one masked token.

    Its gradient is zero for every weight that takes part in a forward pass, as TRL's is for rows without advantage.
    """
    prompts, _ = lengths(batch)
    without_images = [number == 0 for number in batch.get("num_images") or [0] * len(prompts)]
    row = min(range(len(prompts)), key=lambda row: (without_images[row], prompts[row]))
    part = Microbatch((0,), prompts[row], 1, weight=0.0)
    picked = trim(pick(batch, [row]), prompts[row], 1)
    picked.pop("old_per_token_logps", None)  # an importance weight of exactly 1
    return picked | {key: torch.zeros_like(picked[key]) for key in ("completion_mask", "advantages")}, part


def longest(batch: Batch, completion_length: int) -> tuple[Batch, Microbatch]:
    """Return the longest possible sequence, of weight zero: the longest prompt and `completion_length` tokens."""
    prompts, _ = lengths(batch)
    row = max(range(len(prompts)), key=prompts.__getitem__)
    picked = trim(pick(batch, [row]), prompts[row], completion_length)
    present = picked["completion_ids"].size(1)
    missing = completion_length - present
    for key, value in picked.items():
        if (key in COMPLETION and value.ndim == 2 and value.size(1) == present) or key in BOTH:
            # of a reference, a log-probability that makes its exponential zero
            fill = -1e4 if key == "ref_per_token_logps" else NEUTRAL.get(key, 0)
            picked[key] = torch.nn.functional.pad(value, (0, missing), value=fill)
    picked["completion_mask"] = torch.ones_like(picked["completion_ids"])
    # a loss of exactly zero, whatever the padding: no token counts, and no importance weight comes from zeros
    picked["tool_mask"] = torch.zeros_like(picked["completion_ids"])
    picked = {key: value for key, value in picked.items() if key != "old_per_token_logps"}
    return picked, Microbatch((0,), prompts[row], completion_length, weight=0.0)
