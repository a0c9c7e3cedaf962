"""A processor that prepares the images of a group's prompt once, and not once per completion.

TRL gives its processor the prompts of all completions twice: to generate, and for the update. With images of half a
million pixels and 64 completions a Qwen's processor takes 1 to 2.5 s each time on two CPU cores.
"""

from bisect import bisect_left
from copy import copy
from typing import Any

import torch
from transformers import BatchFeature

from grpo.generation.transformers.continuous_batching import first_equal
from grpo.trainer.batch import FIELDS
from grpo.trainer.rollout.image_tokens import as_tensors, by_prompt, can_split, comparable, of_prompts


def once_per_group(processor: Any) -> Any:
    """Return a processor that takes neighbours with equal texts and images once; a tokenizer as it is.

    Its class is a subclass with the same name, which `save_pretrained` writes.
    """
    if not hasattr(processor, "image_processor"):
        return processor
    kind, processor = type(processor), copy(processor)
    processor.__class__ = type(kind.__name__, (OncePerGroup, kind), {"__module__": kind.__module__})
    return processor


class OncePerGroup:
    """The method that `once_per_group` adds to the class of a processor."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> BatchFeature:
        """Return the processor's tokens of texts, and tensors of their images.

        Args:
            images: a list of images for each text, if they are to be taken once.
            text: texts; those of a group are neighbours.
            options: further arguments of the processor.
        """
        call = super().__call__  # type: ignore[misc]  # of the processor
        if isinstance(text, list) and isinstance(images, list) and all(isinstance(of, list) for of in images):
            first = first_equal(list(zip(text, map(comparable, images), strict=True)))
            distinct = sorted(set(first))
            if len(distinct) < len(text):
                shown = [images[place] for place in distinct]
                features = call(images=shown, text=[text[place] for place in distinct], **options)
                if all_rows := repeated(features, shown, [bisect_left(distinct, place) for place in first], self):
                    return all_rows
        return call(images=images, text=text, **options)


def repeated(features: BatchFeature, images: list[list], rows: list[int], processor: Any) -> BatchFeature | None:
    """Return what a processor has found for some rows, which may repeat; None if it is not known what belongs to which.

    Args:
        features: tokens of texts and tensors of their images.
        images: of each text.
        rows: indices of texts.
        processor: has made it.
    """
    tokens = {key: value for key, value in features.items() if key in ("input_ids", "attention_mask")}
    fields = as_tensors({key: value for key, value in features.items() if key not in tokens})
    ids = [torch.as_tensor(row).tolist() for row in tokens["input_ids"]]
    if fields.keys() - FIELDS.keys() or not can_split(fields, images, ids, processor):
        return None
    picked = of_prompts(by_prompt(fields, images, ids, processor), rows)
    for key, value in tokens.items():
        picked[key] = value[rows] if isinstance(value, torch.Tensor) else [list(value[row]) for row in rows]
    return BatchFeature(picked)
