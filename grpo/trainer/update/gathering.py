"""The completions of all processes in a step, so that any process can compute any of them."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from grpo.trainer.batch import FIELDS, Batch, by_row, with_images
from grpo.trainer.processes import any_of
from grpo.trainer.shared_prompts.layout import prompt_keys


def can_move(accelerator: Any, batches: Sequence[Batch], sharded: bool) -> bool:
    """Return whether the processes can compute each other's rows: not where only some of them have images.

    Every process has to call it.

    Args:
        sharded: whether each process has a part of the weights. Those of the tower are needed at once by all processes,
            so that rows with images and others cannot be dealt out freely.
    """
    images = [with_images(batch) for batch in batches]
    has_images, lacks_images = any_of(accelerator, any(images), not all(images))
    return not (has_images and (lacks_images or sharded))


def everyones(accelerator: Any, batch: Batch) -> Batch:
    """Return the rows of all processes as one batch, in the order of the processes, padded to the longest of all.

    Images stay in host memory, by row, those of equal prompts once. Every process has to call it, with as many rows.
    """
    width = batch["prompt_ids"].size(1)
    gathered: Batch = {}
    for key, value in batch.items():
        field = FIELDS[key]
        if field.of == "sequence":
            sides = value[:, :width], value[:, width:]
            wider = [_gathered(accelerator, side, 0, left=not place) for place, side in enumerate(sides)]
            gathered[key] = torch.cat(wider, 1)
        elif field.of in ("prompt", "completion"):
            gathered[key] = _gathered(accelerator, value, field.padding, left=field.of == "prompt")
        elif field.of == "row":
            gathered[key] = gather_object(value)
        elif field.of == "generation":
            gathered[key] = value
    return gathered | (_images(accelerator, batch) if with_images(batch) else {})


def _gathered(accelerator: Any, value: torch.Tensor, padding: float, left: bool) -> torch.Tensor:
    """Return the rows of all processes, padded in the second dimension where there is one."""
    if value.ndim == 2:
        value = accelerator.pad_across_processes(value, dim=1, pad_index=padding, pad_first=left)
    return accelerator.gather(value)


def _images(accelerator: Any, batch: Batch) -> Batch:
    """Return the tensors of images by row, of all processes, as they are in host memory.

    The processes send in turn, so that the device holds those of one process at a time.
    """
    distinct: dict[Any, int] = {}
    for row, key in enumerate(keys := prompt_keys(batch)):
        distinct.setdefault(key, row)
    split = {name: value for name, value in by_row(batch).items() if FIELDS[name].of == "images"}
    images = [{name: _of_row(value, row).cpu().clone() for name, value in split.items()} for row in distinct.values()]
    places = {key: place for place, key in enumerate(distinct)}
    rows: list[dict[str, torch.Tensor]] = []
    for source in range(accelerator.num_processes):
        (sent,) = broadcast_object_list([(images, [places[key] for key in keys])], from_process=source)
        tensors, order = sent
        rows += [tensors[place] for place in order]
    return {name: _alike([row[name] for row in rows]) for name in split}


def _of_row(value: torch.Tensor | list[torch.Tensor], row: int) -> torch.Tensor:
    """Return the images of a row, with a first dimension of 1 where the tensor has one row for each."""
    return value[row] if isinstance(value, list) else value[row : row + 1]


def _alike(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors padded to the largest in all dimensions but the first: processors pad tiles and pictures so."""
    most = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded: dict[int, torch.Tensor] = {}
    for value in values:
        missing = [size - present for present, size in zip(value.shape[1:], most, strict=True)]
        sides = [side for size in reversed(missing) for side in (0, size)]
        padded.setdefault(id(value), torch.nn.functional.pad(value, sides) if any(missing) else value)
    return [padded[id(value)] for value in values]
