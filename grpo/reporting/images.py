"""The images on the page of a run: small files of `completions/images/`, embedded, as many as a page can hold.

Boxes that a completion and its reference answer name are read as rewards read them, to be drawn on an image.
"""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy
from PIL import Image

from rewards.boxes import COORDINATES, in_original, read_boxes, read_reference, sound
from rewards.text import final_part, text_of

MAX_IMAGES = 300
"""Images on a page."""
MAX_BYTES = 4_000_000
"""Bytes of all images on a page, as they are written there."""
MAX_FILE = 200_000
"""Bytes of a file."""
MAX_SIDE = 256
"""Pixels of a side."""
SHOWN_SIDE = 192
"""Pixels of the longest side to which the page enlarges smaller images."""
NAME = re.compile(r"[0-9a-f]{32}\.jpg")
MAX_BOXES = 50
"""Boxes that are drawn per completion."""
Drawn = list[tuple[float, float, float, float]]
"""Boxes: left and upper edge, width and height, each as a part of the image's width or height, 0 to 1."""


def embed(steps: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Put a place in the returned list of images, or None, where groups of completions name files.

    Each file is embedded once. If they do not all fit, each step has the images of its first groups.

    Returns:
        `images`, each with `data` (a JPEG file in base64), `width` and `height` (pixels on the page), and how many
        images are `missing`.
    """
    embedded: list[dict[str, Any]] = []
    places: dict[str, int | None] = {}
    size = 0
    # the first groups of each step, then the second ones, and so on
    rounds = zip_longest(*(step["groups"] for step in steps))
    for group in (group for groups in rounds for group in groups if group and "images" in group):
        for name in group["images"]:
            if name not in places:
                image = read(folder, name) if len(embedded) < MAX_IMAGES else None
                fits = image is not None and size + len(image["data"]) <= MAX_BYTES
                places[name] = len(embedded) if fits else None
                if image and fits:
                    size += len(image["data"])
                    embedded.append(image)
        group["images"] = [places[name] for name in group["images"]]
    return {"images": embedded, "missing": sum(place is None for place in places.values())}


def names_of(cell: Any) -> list[str]:
    """Return the names of files in a row's cell; a column of the data may have the same name."""
    return [name for name in cell if isinstance(name, str) and NAME.fullmatch(name)] if isinstance(cell, list) else []


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a file of a small JPEG image for the page; None if it is missing, broken or something else."""
    file = folder / name
    try:
        if file.stat().st_size > MAX_FILE:
            return None
        with Image.open(file, formats=["JPEG"]) as image:
            if max(image.size) > MAX_SIDE:
                return None
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    scale = max(1.0, SHOWN_SIDE / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    return {"data": base64.b64encode(file.read_bytes()).decode(), "width": width, "height": height}


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
