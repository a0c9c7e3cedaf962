"""Batches as TRL's `GRPOTrainer` holds them: dictionaries of tensors, lists and scalars, one row per completion.

Prompts are padded on the left, completions on the right. The tensors of images (`pixel_values` and others) are
flat over images or tiles; `split_pixel_values_by_grid` makes one tensor per row of them, and its opposite joins these.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from grpo.trainer.microbatch import Microbatch
from grpo.utils.device import sent

Batch = dict[str, Any]


class Field(NamedTuple):
    """A key of a batch."""

    of: str
    """Unit of its values: the tokens of the `prompt`, of the `completion` (or one per row), or of the `sequence` of
    both; the `images` of each row; each `row`; or the `generation` as a whole."""
    padding: float = 0
    """Value of padding, which changes nothing."""


FIELDS = {
    "prompt_ids": Field("prompt"),
    "prompt_mask": Field("prompt"),
    "completion_ids": Field("completion"),
    "completion_mask": Field("completion"),
    "tool_mask": Field("completion", padding=1),
    "advantages": Field("completion"),
    "old_per_token_logps": Field("completion"),
    "ref_per_token_logps": Field("completion"),
    "sampling_per_token_logps": Field("completion"),
    "importance_sampling_ratio": Field("completion", padding=1),  # VESPO adds up logarithms, of padding too
    "token_type_ids": Field("sequence"),
    "mm_token_type_ids": Field("sequence"),
    "pixel_values": Field("images"),
    "image_grid_thw": Field("images"),
    "pixel_attention_mask": Field("images"),
    "spatial_shapes": Field("images"),
    "image_sizes": Field("images"),
    "image_position_ids": Field("images"),
    "num_images": Field("row"),
    "num_tiles": Field("row"),
    "num_items_in_batch": Field("generation"),
    "generated_at": Field("generation"),  # ours: the step
    "completion_id": Field("completion"),  # ours: a number of the row, also in the table of completions
    "router_factors": Field("completion"),  # ours, in the update; see `update/router_loss.py`
    "kept_tokens": Field("completion", padding=-1),  # ours, in scoring; see `rollout/truncated_sampling.py`
}
"""All keys of a batch of TRL, and some of ours."""


def check(keys: Iterable[str]) -> None:
    """Check that it is known what is under these keys of a batch.

    Raises:
        ValueError: of one it is not.
    """
    if unknown := [key for key in keys if key not in FIELDS]:
        raise ValueError(
            f"a batch with {', '.join(unknown)}, of which this version does not know how to divide it: the model's "
            "processor or TRL is newer than what was tested; take another model, or the versions of constraints.txt"
        )


def as_batch(ids: torch.Tensor, mask: torch.Tensor, completion_length: int) -> Batch:
    """Return sequences, (rows, prompt + completion length), as the fields of a batch."""
    prompt = ids.size(1) - completion_length
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": mask[:, :prompt],
        "completion_ids": ids[:, prompt:],
        "completion_mask": mask[:, prompt:],
    }


def as_sequences(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the sequences of a batch, their mask, (rows, prompt + completion length), and the completion length."""
    ids, mask = (torch.cat((batch[f"prompt_{kind}"], batch[f"completion_{kind}"]), 1) for kind in ("ids", "mask"))
    return ids, mask, batch["completion_ids"].size(1)


def with_images(batch: Batch) -> bool:
    """Return whether any row of a batch has images."""
    return any(FIELDS[key].of == "images" for key in batch)


def images_of(batch: Batch) -> Batch:
    """Return the part of a batch that is about images."""
    return {key: batch[key] for key in batch if FIELDS[key].of in ("images", "sequence", "row")}


def by_row(batch: Batch) -> Batch:
    """Return a batch with the tensors of images as lists of one per row; tensors with a row each stay tensors."""
    done = isinstance(batch.get("pixel_values"), list) or has_images_by_row(batch)
    return batch if done else split_pixel_values_by_grid(batch)


def has_images_by_row(batch: Batch) -> bool:
    """Return whether the images of a row are side by side in a tensor, as in Idefics and SmolVLM."""
    return "pixel_attention_mask" in batch and "spatial_shapes" not in batch


def padded_alike(slices: Sequence[Batch]) -> list[Batch]:
    """Return batches without images padded to the longest prompt and the longest completion of all."""
    prompt, completion = (max(part[f"{kind}_ids"].size(1) for part in slices) for kind in ("prompt", "completion"))
    return [padded(part, prompt, completion) for part in slices]


def padded(batch: Batch, prompt_length: int, completion_length: int) -> Batch:
    """Return a batch without images with prompts padded on the left and completions on the right to these lengths."""
    present = {of: batch[f"{of}_ids"].size(1) for of in ("prompt", "completion")}
    before, after = prompt_length - present["prompt"], completion_length - present["completion"]
    sides = {"prompt": (before, 0), "completion": (0, after), "sequence": (before, after)}
    widths = present | {"sequence": sum(present.values())}
    return {
        key: torch.nn.functional.pad(value, sides[of], value=FIELDS[key].padding)
        if (of := FIELDS[key].of) in sides and value.ndim == 2 and value.size(1) == widths[of]
        else value
        for key, value in batch.items()
    }


def join(slices: Sequence[Batch]) -> Batch:
    """Return one batch of all rows of slices of one generation, which are padded alike."""
    if len(slices) == 1:
        return slices[0]
    parts = [by_row(part) for part in slices]
    joined: Batch = {}
    for key, first in parts[0].items():
        if FIELDS[key].of == "generation":
            joined[key] = first
        elif isinstance(first, list):
            joined[key] = [item for part in parts for item in part[key]]
        else:
            joined[key] = torch.cat([part[key] for part in parts])
    return unsplit_pixel_values_by_grid(joined)


def pick(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a batch of these rows, with their images.

    Raises:
        ValueError: a key of it is unknown.
    """
    check(batch)
    picked: Batch = {}
    index = torch.tensor(rows)
    places = {index.device: index}
    for key, value in by_row(batch).items():
        if FIELDS[key].of == "generation":
            picked[key] = value
        elif isinstance(value, list):
            picked[key] = [value[row] for row in rows]
        else:
            if value.device not in places:
                (places[value.device],) = sent([index], value.device)
            picked[key] = value[places[value.device]]
    picked = unsplit_pixel_values_by_grid(picked)
    if not any(picked.get("num_images") or [0]):
        picked = {key: value for key, value in picked.items() if FIELDS[key].of != "images"}
    return picked


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch with its tensors on a device; images of other processes are in host memory."""
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def trim(batch: Batch, prompt_length: int, completion_length: int) -> Batch:
    """Return the batch with prompts cut on the left and completions on the right to these lengths in tokens."""
    padded_prompt = batch["prompt_ids"].size(1)
    first = padded_prompt - prompt_length
    slices = {
        "prompt": slice(first, None),
        "completion": slice(completion_length),
        "sequence": slice(first, padded_prompt + completion_length),
    }
    trimmed = dict(batch)
    for key, value in batch.items():
        if FIELDS[key].of in slices and value.ndim >= 2:
            trimmed[key] = value[:, slices[FIELDS[key].of]]
    return trimmed


def take(batch: Batch, part: Microbatch, multiple: int | None = None) -> Batch:
    """Return the rows of a micro-batch, trimmed to its lengths, or to the next `multiple` of tokens.

    Where rows share their prompts, images are those of one row of each group.
    """
    starts = accumulate((len(group.completions) for group in part.groups), initial=0)
    first = [part.rows[start] for start, _ in zip(starts, part.groups, strict=False)]
    images, text = (
        {key: value for key, value in batch.items() if (FIELDS[key].of in ("images", "row")) == of}
        for of in (True, False)
    )
    picked = pick(text, part.rows)
    picked |= on_device(pick(images, first or part.rows), picked["prompt_ids"].device)
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


def completion_tokens_of_images(batch: Batch) -> list[int]:
    """Return for each row how many tokens of its completion are those of images, which tools have returned."""
    kinds = [value for key, value in batch.items() if FIELDS[key].of == "sequence"]
    if not (kinds and with_images(batch)):
        return [0] * len(batch["prompt_ids"])
    return (kinds[0][:, batch["prompt_ids"].size(1) :] != 0).sum(1).tolist()


def idle(batch: Batch) -> tuple[Batch, Microbatch]:
    """Return a cheap micro-batch of weight zero: a short prompt, with images if there are any, and one masked token.

    Its gradient is zero for every weight that takes part in a forward pass, as TRL's is for rows without advantage.
    """
    prompts, _ = lengths(batch)
    without_images = [number == 0 for number in batch.get("num_images") or [0] * len(prompts)]
    tokens = completion_tokens_of_images(batch)
    row = min(range(len(prompts)), key=lambda row: (without_images[row], tokens[row], prompts[row]))
    length = batch["completion_ids"].size(1) if tokens[row] else 1  # an image needs all of its tokens
    part = Microbatch((0,), prompts[row], length, weight=0.0)
    picked = trim(pick(batch, [row]), prompts[row], length)
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
        field = FIELDS[key]
        if field.of == "sequence" or (field.of == "completion" and value.ndim == 2 and value.size(1) == present):
            # of a reference, a log-probability that makes its exponential zero
            fill = -1e4 if key == "ref_per_token_logps" else field.padding
            picked[key] = torch.nn.functional.pad(value, (0, missing), value=fill)
    picked["completion_mask"] = torch.ones_like(picked["completion_ids"])
    # a loss of exactly zero, whatever the padding: no token counts, and no importance weight comes from zeros
    picked["tool_mask"] = torch.zeros_like(picked["completion_ids"])
    picked = {key: value for key, value in picked.items() if key != "old_per_token_logps"}
    return picked, Microbatch((0,), prompts[row], completion_length, weight=0.0)
