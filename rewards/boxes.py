"""Boxes: parsing in completions, overlaps, and the best one-to-one pairs of two lists.

A box is `[x1, y1, x2, y2]`, its left, upper, right and lower edge. Lists of boxes are arrays of shape (boxes, 4).
"""

import json
import re
from collections.abc import Sequence

import numpy

COORDINATES = {"original": (), "shown": ("image_sizes", "shown_sizes"), "thousandths": ("image_sizes",)}
"""Coordinate systems of completions, and the columns with which they are converted to pixels of the original image."""
# no repetition gives back what it has matched, so that no text takes more than linear time
DIGITS = r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+"
NUMBER = re.compile(DIGITS)
ONE = rf"\s*+{DIGITS}\s*+"
BOX = re.compile(rf"\[{ONE},{ONE},{ONE},{ONE}\]|\({ONE},{ONE}\)\s*+,\s*+\({ONE},{ONE}\)")


def read_boxes(text: str) -> numpy.ndarray:
    """Return the boxes in a text: every JSON list of four numbers, and every `(x1,y1),(x2,y2)`.

    Covers `{"bbox_2d": […], "label": …}`, Qwen2.5-VL's and Qwen3-VL's form, lists of these, lists of plain boxes, and
    `<|box_start|>(x1,y1),(x2,y2)<|box_end|>`, Qwen2-VL's. The marks of the latter are special tokens, which decoding
    skips, so they are not needed.
    """
    boxes = [[float(number) for number in NUMBER.findall(box)] for box in BOX.findall(text)]
    return numpy.array(boxes, dtype=float).reshape(-1, 4)


def read_reference(answer: str, size: Sequence[float] | None = None) -> numpy.ndarray:
    """Return the boxes of a reference answer, a box or a list of boxes in JSON, clipped to the image.

    Raises:
        ValueError: the answer has another form, or a box has no area in the image.
    """
    try:
        boxes = numpy.atleast_2d(numpy.array(json.loads(answer), dtype=float))
    except (ValueError, TypeError, OverflowError, RecursionError):
        boxes = numpy.empty((0, 4))
    if boxes.ndim == 2 and boxes.shape[1] == 4 and len(boxes):
        boxes = sound(boxes, size)
        if boxes.any(axis=1).all():
            return boxes
    where = f", in an image of {size[0]} x {size[1]}" if size else ""
    raise ValueError(f"answer {answer!r:.80}: write [x1, y1, x2, y2], x1 < x2, y1 < y2{where}, or a list of such boxes")


def in_original(
    boxes: numpy.ndarray, coordinates: str, size: Sequence[float] | None, shown: Sequence[float] | None
) -> numpy.ndarray:
    """Return boxes of a coordinate system, a key of `COORDINATES`, in pixels of the original image.

    Args:
        size, shown: width and height of the original image and of the image that the policy sees, pixels.

    Raises:
        ValueError: a size is needed and missing.
    """
    if coordinates == "original":
        return boxes
    per = shown if coordinates == "shown" else (1000, 1000)
    if not size or not per:
        raise ValueError(f"coordinates={coordinates} needs {' and '.join(COORDINATES[coordinates])} of every row")
    with numpy.errstate(over="ignore"):
        return boxes * numpy.tile(numpy.divide(size, per), 2)


def sound(boxes: numpy.ndarray, size: Sequence[float] | None = None) -> numpy.ndarray:
    """Return boxes clipped to an image of this size; zeros without area in it, with swapped corners, or not finite."""
    inside = numpy.clip(boxes, 0, [*size, *size]) if size else boxes
    is_sound = numpy.isfinite(boxes).all(axis=1) & (inside[:, :2] < inside[:, 2:]).all(axis=1)
    return numpy.where(is_sound[:, None], inside, 0.0)


def overlaps(boxes: numpy.ndarray, others: numpy.ndarray) -> numpy.ndarray:
    """Return the intersection over union of each box with each other box, of shape (boxes, others); 0 without area."""
    low = numpy.maximum(boxes[:, None, :2], others[None, :, :2])
    high = numpy.minimum(boxes[:, None, 2:], others[None, :, 2:])
    with numpy.errstate(over="ignore"):  # boxes beyond any image
        shared = numpy.clip(high - low, 0, None).prod(axis=2)
        areas, other_areas = ((each[:, 2:] - each[:, :2]).prod(axis=1) for each in (boxes, others))
        union = areas[:, None] + other_areas - shared
    return numpy.divide(shared, union, out=numpy.zeros_like(shared), where=union > 0)


def best_sum(values: numpy.ndarray) -> float:
    """Return the largest sum of values in which no row and no column occurs twice; exact.

    The Hungarian algorithm with shortest augmenting paths (Crouse, 10.1109/TAES.2016.140952). Time grows with
    rows x rows x columns, where there are no more rows than columns.
    """
    values = (values if values.shape[0] <= values.shape[1] else values.T).astype(float)
    cost, (rows, columns) = -values, values.shape
    of_row, of_column = numpy.zeros(rows), numpy.zeros(columns)  # prices
    row_of, column_of = numpy.full(columns, -1), numpy.full(rows, -1)  # pairs
    for new in range(rows):
        length, before = numpy.full(columns, numpy.inf), numpy.full(columns, -1)  # of the paths from the new row
        path: list[int] = []
        row, shortest = new, 0.0
        while row >= 0:  # to the next nearest column, until one is free
            onward = shortest + cost[row] - of_row[row] - of_column
            onward[path] = numpy.inf
            shorter = onward < length
            length[shorter], before[shorter] = onward[shorter], row
            ahead = length.copy()
            ahead[path] = numpy.inf
            column = int(ahead.argmin())
            path.append(column)
            shortest, row = length[column], row_of[column]
        of_row[new] += shortest
        of_row[row_of[path[:-1]]] += shortest - length[path[:-1]]
        of_column[path] -= shortest - length[path]
        while row != new:  # pair along the path
            row = before[column]
            row_of[column], column_of[row], column = row, column, column_of[row]
    return float(values[range(rows), column_of].sum())
