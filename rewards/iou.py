"""Overlap of the boxes in a completion's final answer with those of the reference: intersection over union, 0 to 1."""

from collections.abc import Sequence
from typing import Any

from rewards.boxes import COORDINATES, best_sum, in_original, overlaps, read_boxes, read_reference, sound
from rewards.text import final_part, text_of


def iou(
    completions: Sequence[Any],
    answer: Sequence[str],
    image_sizes: Sequence[Any] | None = None,
    shown_sizes: Sequence[Any] | None = None,
    coordinates: str = "original",
    threshold: float | None = None,
    **columns: Any,
) -> list[float | Exception]:
    """Sum the overlaps of the best one-to-one pairs of boxes and divide by the larger of the two numbers of boxes.

    Args:
        answer: `[x1, y1, x2, y2]` or a list of such boxes in JSON, pixels of the row's first image before any resizing.
        image_sizes: `[width, height]` of each image of a row, pixels; boxes are clipped to the first image.
        shown_sizes: the same after resizing, as the policy sees them.
        coordinates: unit in completions: `original` pixels, `shown` pixels, or `thousandths` of width and height.
        threshold: overlap of a correct box; the reward is then 1.0 if all boxes are correct and none is missing, else
            0.0.

    Returns:
        A reward per completion, or the error of a row whose answer or sizes cannot be used.
    """
    check(coordinates, threshold)
    size_columns = {"image_sizes": image_sizes, "shown_sizes": shown_sizes}
    if missing := [column for column in COORDINATES[coordinates] if size_columns[column] is None]:
        raise ValueError(f"coordinates={coordinates} needs the column {missing[0]}")

    def score(row: int) -> float | Exception:
        size, shown = (sizes[row][0] if sizes and sizes[row] else None for sizes in size_columns.values())
        try:
            reference = read_reference(str(answer[row]), size)
            named = in_original(read_boxes(final_part(text_of(completions[row]))), coordinates, size, shown)
        except ValueError as error:
            return error
        values = overlaps(sound(named, size), reference)
        larger = max(values.shape)
        return best_sum(values) / larger if threshold is None else float(best_sum(values >= threshold) == larger)

    return [score(row) for row in range(len(completions))]


def check(coordinates: str = "original", threshold: float | None = None, **kwargs: Any) -> None:
    """Raise ValueError, with a line, for a wrong option; called before the run."""
    if coordinates not in COORDINATES:
        raise ValueError(f"kwargs.coordinates={coordinates}: there are {', '.join(COORDINATES)}")
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"kwargs.threshold={threshold}: give an overlap above 0 and up to 1, or null")


iou.check = check  # type: ignore[attr-defined]
