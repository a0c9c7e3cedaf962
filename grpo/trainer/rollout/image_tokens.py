"""Images in rollouts: which part of their tensors belongs to which prompt, and completions that write their token."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL.Image import Image as Picture

from grpo.trainer.batch import FIELDS, Batch, has_images_by_row, pick
from grpo.utils.errors import GenerationError


def comparable(images: Sequence[Any]) -> list[Any]:
    """Return what is equal for equal images: pictures and paths themselves; of others, as arrays, their identity."""
    return [image if isinstance(image, (Picture, str)) else id(image) for image in images]


def tiles(prompt_ids: Sequence[list[int]], processor: Any) -> list[int]:
    """Return the tiles of each prompt's images, where a tile is a fixed number of tokens, as in InternVL."""
    size = getattr(processor, "image_seq_length", None) or 1
    return [ids.count(getattr(processor, "image_token_id", -1)) // size for ids in prompt_ids]


def can_split(fields: Batch, images: list | None, prompt_ids: Sequence[list[int]], processor: Any) -> bool:
    """Tell whether it is known which part of the images' tensors, as generation has them, belongs to which prompt."""
    if not images or "pixel_values" not in fields:
        return True
    count = len(fields["pixel_values"])
    if has_images_by_row(fields):
        return count == len(images)
    return "spatial_shapes" not in fields and count in (
        sum(len(row or []) for row in images),
        sum(tiles(prompt_ids, processor)),
        sum(int(grid[0]) * int(grid[1]) * int(grid[2]) for grid in fields.get("image_grid_thw", [])),
    )


def as_tensors(fields: Batch) -> Batch:
    """Return fields whose images are tensors; some processors give lists, of which TRL's loop of tool calls fails.

    With environments TRL gives each prompt to the processor alone, whose images then differ in their number of tiles:
    these are padded as the processor pads those of one call.
    """
    tensors = dict(fields)
    for key, value in fields.items():
        if key in FIELDS and FIELDS[key].of == "images":
            is_array = isinstance(value, (np.ndarray, torch.Tensor))
            tensors[key] = torch.as_tensor(value) if is_array else padded(list(map(np.asarray, value)))
    return tensors


def padded(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Return arrays as one tensor, those with fewer tiles, their first dimension, padded with zeros."""
    most = max((len(array) for array in arrays if array.ndim > 1), default=0)
    gaps = [[(0, most - len(array) if array.ndim > 1 else 0), *[(0, 0)] * (array.ndim - 1)] for array in arrays]
    return torch.as_tensor(np.stack([np.pad(array, gap) for array, gap in zip(arrays, gaps, strict=True)]))


def by_prompt(fields: Batch, images: list | None, prompt_ids: Sequence[list[int]], processor: Any) -> Batch:
    """Return the tensors of generation with the numbers of images, and of tiles, by which `pick` divides them."""
    if not images:
        return dict(fields)
    batch = fields | {"num_images": [len(row or []) for row in images]}
    if sum(count := tiles(prompt_ids, processor)) == len(fields.get("pixel_values", ())):
        batch["num_tiles"] = count
    return batch


def of_prompts(divided: Batch, places: Sequence[int]) -> Batch:
    """Return the tensors of some prompts, which may repeat, from the result of `by_prompt`."""
    return {key: value for key, value in pick(divided, places).items() if FIELDS[key].of != "row"}


def end_before(
    tokens: set[int], eos: int, completions: list[list[int]], logprobs: list | None
) -> tuple[list, list | None]:
    """Return completions that end before a token of images or videos, and the log-probabilities of the tokens left.

    No image belongs to one that a policy writes, and the model would stop at the mismatch. A completion that begins
    with it becomes the token `eos`, whose log-probability is unknown: None, as of a token that vLLM could not score.
    """
    ends = [next((place for place, token in enumerate(ids) if token in tokens), len(ids)) for ids in completions]
    completions = [ids[:end] or [eos] for ids, end in zip(completions, ends, strict=True)]
    if logprobs is not None:
        logprobs = [values[:end] or [None] for values, end in zip(logprobs, ends, strict=True)]
    return completions, logprobs


def check_sees(processor: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Check that the policy sees the images in the results of tools, if there are any.

    Raises:
        GenerationError: it reads text alone, or TRL does not know the token of its images.
    """
    for message in messages:
        parts = message["content"] if isinstance(message["content"], list) else []
        shows = any(isinstance(part, dict) and part.get("type") == "image" for part in parts)
        if shows and not hasattr(
            getattr(processor, "image_processor", None), "merge_size"
        ):  # Qwen's, and those like it
            raise GenerationError(
                f"tool {message['name']!r} returned an image, which only a policy like Qwen-VL can read: return a "
                "description"
            )


def without_image_tokens(messages: Sequence[dict[str, Any]], processor: Any) -> list[dict[str, Any]]:
    """Return messages of tools whose texts have no token of an image: no image would belong to it.

    A tool may echo what a policy has written, or a page of the web.
    """
    names = [getattr(processor, f"{kind}_token", None) for kind in ("image", "boi", "video")]

    def cleaned(text: str) -> str:
        for name in filter(None, names):
            text = text.replace(name, "")
        return text

    def part_of(part: Any) -> Any:
        return part | {"text": cleaned(part["text"])} if isinstance(part, dict) and "text" in part else part

    return [
        {**message, "content": cleaned(content) if isinstance(content, str) else list(map(part_of, content))}
        for message in messages
        for content in [message["content"]]
    ]
