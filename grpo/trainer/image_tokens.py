"""Images in rollouts: which part of their tensors belongs to which prompt, and completions that write their token."""

from collections.abc import Sequence
from typing import Any

from grpo.trainer.batch import Batch


def tiles(prompt_ids: Sequence[list[int]], processor: Any) -> list[int]:
    """Return the tiles of each prompt's images, where a tile is a fixed number of tokens, as in InternVL."""
    size = getattr(processor, "image_seq_length", None) or 1
    return [ids.count(getattr(processor, "image_token_id", -1)) // size for ids in prompt_ids]


def can_split(fields: Batch, images: list | None) -> bool:
    """Tell whether it is known which part of the images' tensors, as generation has them, belongs to which prompt."""
    if not images or "pixel_values" not in fields:
        return True
    return "spatial_shapes" not in fields and len(fields["pixel_values"]) in (
        len(images),
        sum(fields.get("num_tiles", [])),
        sum(len(row or []) for row in images),
        sum(int(grid[0]) * int(grid[1]) * int(grid[2]) for grid in fields.get("image_grid_thw", [])),
    )


def end_before(token: int, eos: int, completions: list[list[int]], logprobs: list | None) -> tuple[list, list | None]:
    """Return completions that end before the token of images, and the log-probabilities of what is left.

    No image belongs to one that a policy writes, and the model would stop at the mismatch. A completion that begins
    with it becomes the token `eos`.
    """
    ends = [ids.index(token) if token in ids else len(ids) for ids in completions]
    kept = [ids[:end] or [eos] for ids, end in zip(completions, ends, strict=True)]
    if logprobs is not None:
        logprobs = [values[: len(ids)] for values, ids in zip(logprobs, kept, strict=True)]
    return kept, logprobs
