import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.builtin.tasks.shapes import CELL, COLOURS, draw_problem, picture, problems, rows


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_answer_can_be_seen_in_the_picture(draw: object) -> None:
    """Of the cells that are not white the number is counted; most coloured pixels are the largest shape's."""
    problem = draw_problem(draw)  # type: ignore[arg-type]
    pixels = np.asarray(picture(problem))
    cells = [pixels[y : y + CELL, x : x + CELL] for y in range(0, 96, CELL) for x in range(0, 96, CELL)]
    assert sum(bool((cell < 255).any()) for cell in cells) == len(problem.shapes)
    largest = max(problem.shapes, key=lambda shape: shape.size)
    assert [shape.size for shape in problem.shapes].count(largest.size) == 1
    middle = pixels[largest.top + largest.size // 2, largest.left + largest.size // 2]
    assert tuple(middle) == COLOURS[largest.colour]
    assert problem.answer == (str(len(problem.shapes)) if problem.counts else largest.name)


def test_rows_follow_from_the_seed_and_splits_share_no_picture() -> None:
    assert rows("train", 20, 1) == rows("train", 20, 1)
    assert rows("train", 20, 1) != rows("train", 20, 2)
    seen: dict[str, set[tuple]] = {}
    for split in ("train", "test"):
        stream = problems(split)
        seen[split] = {next(stream).shapes for _ in range(500)}
    assert not seen["train"] & seen["test"]
