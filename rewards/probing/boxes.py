"""Boxes as answers: correct in every form that policies write, incorrect, and cheats."""

import json
from typing import Any

import numpy

from rewards.boxes import overlaps, read_reference

FORMS = ("xml", "bbox_2d", "box_start")
LIKE = 0.5
"""Overlap above which a box is too similar to the correct box for a cheat."""


def boxes_of(row: dict[str, Any]) -> numpy.ndarray | None:
    """Return the boxes in a row's answer, pixels of the original image; None if the answer is something else."""
    try:
        return read_reference(str(row.get("answer")), _size(row, "image_sizes"))
    except ValueError:
        return None


def styles(row: dict[str, Any]) -> list[str]:
    """Return the forms in each coordinate system that the row has the sizes for: `xml`, `xml in thousandths`."""
    return [form + system for form in FORMS for system in _systems(row)]


def written(row: dict[str, Any], boxes: numpy.ndarray, style: str) -> str:
    """Return boxes in a style of policies; for a style that is not in `styles`, as a list in original pixels."""
    form = style.partition(" ")[0]
    system = style.removeprefix(form)
    scaled = (boxes * _systems(row)[system]).round() if system else boxes
    numbers = [[int(number) if number == int(number) else float(number) for number in box] for box in scaled]
    if form == "bbox_2d":
        return json.dumps([{"bbox_2d": box, "label": "it"} for box in numbers])
    if form == "box_start":
        return "".join("<|box_start|>({},{}),({},{})<|box_end|>".format(*box) for box in numbers)
    return json.dumps(numbers[0] if len(numbers) == 1 else numbers)


def changed(boxes: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """Return incorrect boxes by name."""
    sides = numpy.tile(boxes[:, 2:] - boxes[:, :2], 2)
    return {"moved by its size": boxes + sides, "a quarter of it": boxes - sides * [0, 0, 0.5, 0.5]}


def cheats(row: dict[str, Any], boxes: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """Return boxes by name that earn less than the correct boxes; large boxes only if unlike a correct box."""
    sides, image = numpy.tile(boxes[:, 2:] - boxes[:, :2], 2), _image(row, boxes)
    large = {
        "the whole image": image[None],
        "the right center, but huge": numpy.clip(boxes + sides * [-2, -2, 2, 2], 0, image[[2, 3, 2, 3]]),
    }
    large = {name: cheat for name, cheat in large.items() if overlaps(cheat, boxes).max() < LIKE}
    return {**large, "a hundred boxes": hundred(row, boxes), "swapped corners": boxes[:, [2, 3, 0, 1]]}


def hundred(row: dict[str, Any], boxes: numpy.ndarray) -> numpy.ndarray:
    """Return the correct boxes and the cells of a grid over the image, a hundred together."""
    grid = numpy.array([[column, line, column + 1, line + 1] for line in range(10) for column in range(10)])
    cells = (grid * _image(row, boxes)[[2, 3, 2, 3]] / 10).round()
    return numpy.concatenate([boxes, cells])[: max(100, len(boxes) + 1)]


def _image(row: dict[str, Any], boxes: numpy.ndarray) -> numpy.ndarray:
    """Return the whole image as a box; without its size, a box twice as large as necessary."""
    return numpy.array([0, 0, *(_size(row, "image_sizes") or 2 * boxes[:, 2:].max(axis=0))])


def _size(row: dict[str, Any], column: str) -> list[float] | None:
    """Return width and height of the row's first image, pixels; None without the column."""
    return row[column][0] if row.get(column) else None


def _systems(row: dict[str, Any]) -> dict[str, numpy.ndarray]:
    """Return the factors from pixels of the original image to each coordinate system, by the end of its styles."""
    size, shown = _size(row, "image_sizes"), _size(row, "shown_sizes")
    per = {" in shown pixels": shown, " in thousandths": [1000, 1000]}
    factors = {name: numpy.tile(numpy.divide(of, size), 2) for name, of in per.items() if size and of}
    return {"": numpy.ones(4), **factors}
