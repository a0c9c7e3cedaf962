"""Questions about pictures of coloured shapes, drawn from a seed without a download: the built-in task with images.

A picture of 96 by 96 pixels has 3 to 9 shapes in the cells of a grid. A question asks for their number, or for the
largest shape::

    How many shapes are there?          7
    Which shape is the largest?         blue circle
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from PIL import Image, ImageDraw

from grpo.builtin.tasks.splits import of_split

CELLS, CELL = 4, 24
"""Cells in a row of the grid, and pixels in a row of a cell."""
COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 119, 180), "yellow": (240, 200, 40)}
KINDS = ("circle", "square", "triangle")
SIZES = (10, 14, 22)
"""Widths in pixels: small shapes, medium shapes, and the single largest shape."""


@dataclass(frozen=True)
class Shape:
    """A shape of a picture."""

    colour: str
    kind: str
    size: int
    """Pixels across."""
    left: int
    top: int

    @property
    def name(self) -> str:
        """Its name in an answer."""
        return f"{self.colour} {self.kind}"


@dataclass(frozen=True)
class Problem:
    """A picture with a question."""

    shapes: tuple[Shape, ...]
    counts: bool
    """Whether the question asks for the number of shapes; otherwise it asks for the largest shape."""

    @property
    def question(self) -> str:
        """Text of the question."""
        return "How many shapes are there?" if self.counts else "Which shape is the largest?"

    @property
    def answer(self) -> str:
        """The answer to it."""
        return str(len(self.shapes)) if self.counts else max(self.shapes, key=lambda shape: shape.size).name


def draw_problem(rng: random.Random) -> Problem:
    """Draw one problem; both questions are as likely."""
    cells = rng.sample(range(CELLS**2), rng.randint(3, 9))
    sizes = [SIZES[-1], *(rng.choice(SIZES[:-1]) for _ in cells[1:])]
    shapes = []
    for cell, size in zip(cells, sizes, strict=True):
        row, column = divmod(cell, CELLS)
        left, top = (place * CELL + rng.randint(1, CELL - size - 1) for place in (column, row))
        shapes.append(Shape(rng.choice(list(COLOURS)), rng.choice(KINDS), size, left, top))
    return Problem(tuple(shapes), rng.random() < 0.5)


def picture(problem: Problem) -> Image.Image:
    """Return the picture of a problem, RGB on white."""
    image = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    draw = ImageDraw.Draw(image)
    for shape in problem.shapes:
        right, bottom, fill = shape.left + shape.size - 1, shape.top + shape.size - 1, COLOURS[shape.colour]
        if shape.kind == "circle":
            draw.ellipse((shape.left, shape.top, right, bottom), fill)
        elif shape.kind == "square":
            draw.rectangle((shape.left, shape.top, right, bottom), fill)
        else:
            draw.polygon([(shape.left, bottom), (right, bottom), ((shape.left + right) // 2, shape.top)], fill)
    return image


def problems(split: str, seed: int = 0) -> Iterator[Problem]:
    """Yield problems of a split without end; the picture decides which, so that no picture is in both."""
    return of_split(draw_problem, lambda problem: problem.shapes, split, seed)


def rows(split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Return `size` rows of a split with `image`, `question`, `answer` and the number of `shapes`."""
    drawn = islice(problems(split, seed), size)
    return [{"image": picture(p), "question": p.question, "answer": p.answer, "shapes": len(p.shapes)} for p in drawn]
