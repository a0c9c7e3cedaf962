"""A processor that prepares the images of a group's prompt once, and not once per completion.

TRL gives its processor the prompts of all completions twice: to generate, and for the update. For half a million
pixels a Qwen's processor takes 55 ms on a CPU, so that is 7 s of a step with 64 completions.
"""

from bisect import bisect_left
from copy import copy
from typing import Any

import torch
from transformers import BatchFeature

from grpo.generation.at_once import first_equal
from grpo.trainer.batch import FIELDS, pick
from grpo.trainer.rollout.image_tokens import as_tensors, by_prompt, can_split


def once_per_group(processor: Any) -> Any:
    """Return a processor that takes neighbours with equal texts and images once; a tokenizer as it is."""
    if not hasattr(processor, "image_processor"):
        return processor
    kind, found = type(processor), copy(processor)
    found.__class__ = type(kind.__name__, (OncePerGroup, kind), {"__module__": kind.__module__})
    return found


class OncePerGroup:
    """What `once_per_group` adds to the class of a processor."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> BatchFeature:
        """Return the processor's tokens of texts, and tensors of their images.

        Args:
            images: a list of images for each text, if they are to be taken once.
            text: texts; those of a group are neighbours.
            options: further arguments of the processor.
        """
        call = super().__call__  # type: ignore[misc]  # of the processor
        if not (isinstance(text, list) and isinstance(images, list) and all(isinstance(of, list) for of in images)):
            return call(images=images, text=text, **options)
        first = first_equal(list(zip(text, images, strict=True)))
        distinct = sorted(set(first))
        if len(distinct) < len(text):
            shown = [images[place] for place in distinct]
            found = call(images=shown, text=[text[place] for place in distinct], **options)
            ids = [torch.as_tensor(row).tolist() for row in found["input_ids"]]
            fields = as_tensors({key: value for key, value in found.items() if key in FIELDS})
            others = {key: value for key, value in found.items() if key not in FIELDS}
            if others.keys() <= {"input_ids", "attention_mask"} and can_split(fields, shown, ids, self):
                rows = [bisect_left(distinct, place) for place in first]
                picked = pick(by_prompt(fields, shown, ids, self), rows)
                tensors = {key: value for key, value in picked.items() if FIELDS[key].of != "row"}
                return BatchFeature({key: repeated(value, rows) for key, value in others.items()} | tensors)
        return call(images=images, text=text, **options)


def repeated(values: Any, rows: list[int]) -> Any:
    """Return these rows of a tensor or of a list of lists."""
    return values[rows] if isinstance(values, torch.Tensor) else [list(values[row]) for row in rows]
