"""Boxes that a completion and its reference answer name, read as rewards read them, to be drawn on an image."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from rewards.boxes import COORDINATES, final_part, in_original, read_boxes, read_reference, sound
from rewards.text import text_of

MAX_BOXES = 50
"""Boxes that are drawn per completion."""

Drawn = list[tuple[float, float, float, float]]
"""Boxes: left and upper edge, width and height, each as a part of the image's width or height, 0 to 1."""


def coordinates(rewards: Mapping[Any, Any]) -> str:
    """Return the coordinate system of boxes in completions: that which a reward names, or `original` pixels."""
    named = [(reward.get("kwargs") or {}).get("coordinates") for reward in rewards.values()]
    return next((str(name) for name in named if name in [*COORDINATES]), "original")


def reference_boxes(row: dict[str, Any]) -> Drawn:
    """Return the boxes of a row's `answer`; none if it is no box, or if the row has no `image_sizes`."""
    size = size_of(row.get("image_sizes"))
    try:
        return in_parts(read_reference(str(row.get("answer")), size), size) if size else []
    except (ValueError, OverflowError, RecursionError):
        return []


def named_boxes(row: dict[str, Any], coordinates: str) -> tuple[Drawn, int]:
    """Return the boxes with an area in the image that a row's `completion` names, and how many it names at all.

    Their coordinates are a key of `rewards.boxes.COORDINATES`.
    """
    size, shown = size_of(row.get("image_sizes")), size_of(row.get("shown_sizes"))
    boxes = read_boxes(final_part(text_of(row["completion"])))
    if size is None or (coordinates == "shown" and shown is None):
        return [], len(boxes)
    inside = sound(in_original(boxes, coordinates, size, shown), size)
    return in_parts(inside[inside.any(axis=1)], size), len(boxes)


def in_parts(boxes: numpy.ndarray, size: Sequence[float]) -> Drawn:
    """Return the first `MAX_BOXES` boxes, which are in the image, as parts of its width and height."""
    left, upper, right, lower = (boxes[:MAX_BOXES] / numpy.tile(size, 2)).T
    corners = numpy.stack((left, upper, right - left, lower - upper), axis=1)
    return [tuple(row) for row in corners.round(4).tolist()]


def size_of(sizes: Any) -> Sequence[float] | None:
    """Return width and height of the first image of a row; None if they are not there, or no lengths."""
    first = sizes[0] if isinstance(sizes, list) and sizes else None
    if not isinstance(first, list) or len(first) != 2:
        return None
    return first if all(isinstance(side, int | float) and math.isfinite(side) and side > 0 for side in first) else None
