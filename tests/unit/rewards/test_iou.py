import itertools
import random
import time

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.boxes import best_sum, overlaps, read_boxes
from rewards.iou import iou

WIDTH, HEIGHT = 640, 480
EXACT = [[64, 48, 320, 240]]
BOX = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50), st.integers(1, 50)).map(
    lambda four: [four[0], four[1], four[0] + four[2], four[1] + four[3]]
)
BOXES = st.lists(BOX, min_size=1, max_size=4)


def score(text: str, answer: object, **kwargs: object) -> float:
    """The reward of one completion in an image of 640 by 480 pixels, shown at half its size."""
    sizes = {"image_sizes": [[[WIDTH, HEIGHT]]], "shown_sizes": [[[WIDTH // 2, HEIGHT // 2]]]}
    (reward,) = iou([text], [str(answer)], **{**sizes, **kwargs})
    if isinstance(reward, Exception):
        raise reward
    return reward


@pytest.mark.parametrize(
    "text",
    [
        '```json\n[\n\t{"bbox_2d": [64, 48, 320, 240], "label": "dog"}\n]\n```',
        '{"bbox_2d": [64, 48, 320, 240]}',
        '{"label": "a dog, 3 years", "bbox_2d": [64.0, 48.0, 320.0, 240.0]}',
        "[64, 48, 320, 240]",
        "[[64, 48, 320, 240]]",
        "It is at [64,48,320,240].",
        "<think>[0, 0, 9, 9]?</think><answer>[64, 48, 320, 240]</answer>",
        '<answer>\n```json\n[{"bbox_2d": [64, 48, 320, 240]}]\n```\n</answer> and [1, 2, 3, 4]',
        "<answer>[0, 0, 9, 9]</answer> no, <answer>[64, 48, 320, 240]</answer>",
        "perhaps [0, 0, 9, 9]?</think>\n[64, 48, 320, 240]",
        "<|object_ref_start|>dog<|object_ref_end|><|box_start|>(64,48),(320,240)<|box_end|>",
        "dog(64,48),(320,240)",  # the same, decoded without special tokens
        "(64, 48), (320, 240)",
        r"\boxed{[64, 48, 320, 240]}",
        "[6.4e1, 48., +320, 240]",
    ],
)
def test_a_box_is_read_in_every_form_that_policies_write(text: str) -> None:
    assert score(text, EXACT[0]) == 1.0


@pytest.mark.parametrize(
    ("coordinates", "box"),
    [("original", [64, 48, 320, 240]), ("shown", [32, 24, 160, 120]), ("thousandths", [100, 100, 500, 500])],
)
def test_a_box_is_read_in_the_coordinates_that_the_policy_writes(coordinates: str, box: list[int]) -> None:
    assert score(f"{box}", EXACT, coordinates=coordinates) == pytest.approx(1.0)
    others = {"original", "shown", "thousandths"} - {coordinates}
    assert all(score(f"{box}", EXACT, coordinates=other) < 0.5 for other in others)


def test_of_several_images_the_first_counts() -> None:
    sizes = {"image_sizes": [[[WIDTH, HEIGHT], [10, 10]]], "shown_sizes": [[[WIDTH // 2, HEIGHT // 2], [99, 9]]]}
    assert score("[32, 24, 160, 120]", EXACT, coordinates="shown", **sizes) == 1.0


def test_the_reward_is_the_intersection_over_the_union() -> None:
    assert score("[0, 0, 10, 10]", [0, 0, 10, 20]) == 0.5
    assert score("[0, 0, 10, 10]", [5, 0, 15, 10]) == pytest.approx(1 / 3)
    assert score("[0, 0, 10, 10]", [10, 0, 20, 10]) == 0.0


def test_with_a_threshold_the_reward_is_one_or_zero() -> None:
    assert score("[0, 0, 10, 10]", [0, 0, 10, 20], threshold=0.5) == 1.0
    assert score("[0, 0, 10, 9]", [0, 0, 10, 20], threshold=0.5) == 0.0
    assert score("[0, 0, 10, 10] [20, 20, 30, 30]", [0, 0, 10, 10], threshold=0.5) == 0.0  # not one box too many
    assert score("[0, 0, 10, 10]", [[0, 0, 10, 10], [20, 20, 30, 30]], threshold=0.5) == 0.0  # nor one too few
    assert score("[20, 20, 30, 30] [0, 0, 10, 10]", [[0, 0, 10, 10], [20, 20, 30, 30]], threshold=0.5) == 1.0


def test_boxes_are_paired_so_that_the_sum_is_largest() -> None:
    references = [[0, 0, 10, 10], [0, 5, 10, 15]]
    # the first box overlaps the second reference more, but the other box overlaps the first reference hardly at all
    text = "[[0, 3, 10, 13], [0, 8, 10, 18]]"
    assert score(text, references) == pytest.approx((7 / 13 + 7 / 13) / 2)


def test_a_box_that_is_missing_costs_as_much_as_one_too_many() -> None:
    two = [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert score("[0, 0, 10, 10]", two) == score(f"{two}", [0, 0, 10, 10]) == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing",
        "[]",
        "[1, 2, 3]",
        "[1, 2, 3, 4, 5]",
        "[320, 240, 64, 48]",
        "[320, 48, 64, 240]",
        "(320,240),(64,48)",
        "[64, 48, 64, 240]",
        "[64, 48, 64, 48]",
        "[NaN, NaN, NaN, NaN]",
        "[0, 0, Infinity, Infinity]",
        "[0, 0, 1e999, 1e999]",
        "[-1e999, -1e999, 1e999, 1e999]",
        "[700, 500, 900, 800]",
        "[-90, -90, -1, -1]",
        f"[{'9' * 5000}, 0, {'9' * 5001}, 9]",
        '{"bbox_2d": "somewhere"}',
        '{"bbox_2d": [64, 48, 320',
        "[[[[[[",
        "<answer></answer> [64, 48, 320, 240]",
        "<answer>there</answer> [64, 48, 320, 240]",
        "<think>[64, 48, 320, 240]",
        "<think>[64, 48, 320, 240]</think> there",
    ],
)
@pytest.mark.filterwarnings("error")
def test_what_is_no_box_in_the_image_earns_nothing(text: str) -> None:
    for coordinates in ("original", "shown", "thousandths"):
        assert score(text, EXACT, coordinates=coordinates) == 0.0
        assert score(text, EXACT, coordinates=coordinates, threshold=0.5) == 0.0


def test_a_box_is_clipped_to_the_image() -> None:
    right_half = [320, 0, 640, 480]
    assert score("[320, -1000, 1e30, 1e30]", right_half) == 1.0
    assert score("[320, 0, 1280, 480]", right_half, image_sizes=None) == pytest.approx(1 / 3)
    assert score("[320, 0, 640, 480]", [320, -2, 641.5, 480]) == 1.0  # references too, which may be a pixel too large


@pytest.mark.filterwarnings("error")
def test_huge_numbers_earn_nothing_without_the_image_size() -> None:
    assert score("[-1e308, -1e308, 1e308, 1e308]", EXACT, image_sizes=None) == 0.0


@given(st.lists(BOX, min_size=1, max_size=6), BOX)
def test_several_boxes_for_one_earn_no_more_than_the_best_alone(boxes: list[list[int]], answer: list) -> None:
    together, alone = score(f"{boxes}", answer), max(score(f"{box}", answer) for box in boxes)
    assert together == pytest.approx(alone / len(boxes))
    assert score(f"{boxes}", answer, threshold=0.5) <= (len(boxes) == 1)


@given(BOXES, BOX, BOXES)
def test_a_box_that_overlaps_no_reference_never_helps(boxes: list, box: list[int], answer: list) -> None:
    elsewhere = [number + 200 for number in box]
    assert score(f"{[*boxes, elsewhere]}", answer) <= score(f"{boxes}", answer)


@given(BOXES, BOXES)
def test_the_reward_is_symmetric_and_between_zero_and_one(some: list[list[int]], others: list[list[int]]) -> None:
    assert score(f"{some}", others) == pytest.approx(score(f"{others}", some))
    assert 0.0 <= score(f"{some}", others) <= 1.0


@given(BOXES, st.randoms())
def test_the_reward_is_one_for_the_same_boxes_in_any_order(boxes: list[list[int]], rng: random.Random) -> None:
    shuffled = list(boxes)
    rng.shuffle(shuffled)
    assert score(f"{shuffled}", boxes) == score(f"{shuffled}", boxes, threshold=1.0) == 1.0


@given(BOX, BOX, st.integers(-20, 20))
def test_an_overlap_does_not_depend_on_the_place(one: list[int], other: list[int], step: int) -> None:
    boxes, others = numpy.array([one], float), numpy.array([other], float)
    assert overlaps(boxes, others) == pytest.approx(overlaps(boxes + step, others + step))


@given(st.integers(0, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_the_best_sum_is_that_of_the_best_permutation(rows: int, columns: int, rng: random.Random) -> None:
    values = numpy.array([[rng.randint(0, 9) for _ in range(columns)] for _ in range(rows)]).reshape(rows, columns)
    wide = values if rows <= columns else values.T
    ways = itertools.permutations(range(wide.shape[1]), wide.shape[0])
    assert best_sum(values) == max(sum(wide[row, at] for row, at in enumerate(way)) for way in ways)


@given(st.text(alphabet='[](){},.-+eE0123456789 \nNaInfity<>|/answerthkbox_2d":', max_size=200))
def test_no_text_breaks_the_reading(text: str) -> None:
    assert 0.0 <= score(text, EXACT) <= 1.0


@pytest.mark.parametrize(
    "part", ["[", "[ ", "(", "[1,", "(1,1),", "[[1,1,1,", "<answer>", "<think>", "[1.", "[-", "1e1", "</answer>"]
)
def test_a_long_text_is_read_in_linear_time(part: str) -> None:
    started = time.process_time()
    assert score(part * (100_000 // len(part)), EXACT) == 0.0
    assert score("[" + part[-1] * 100_000, EXACT) == 0.0
    assert time.process_time() - started < 1.0


def test_thousands_of_boxes_earn_next_to_nothing_in_little_time() -> None:
    started = time.process_time()
    assert score("[64, 48, 320, 240]" * 5000, EXACT) == pytest.approx(1 / 5000)
    assert score("[64, 48, 320, 240]" * 5000, EXACT * 50) == pytest.approx(1 / 100)
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"coordinates": "relative"}, "kwargs.coordinates=relative: there are original, shown, thousandths"),
        ({"threshold": 0}, "kwargs.threshold=0: give an overlap above 0 and up to 1"),
        ({"threshold": 50}, "kwargs.threshold=50"),
        ({"coordinates": "shown", "shown_sizes": None}, "coordinates=shown needs the column shown_sizes"),
        ({"coordinates": "thousandths", "image_sizes": None}, "coordinates=thousandths needs the column image_sizes"),
    ],
)
def test_a_wrong_option_or_a_missing_column_is_one_line(kwargs: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        score("[1, 2, 3, 4]", EXACT, **kwargs)
    assert "\n" not in str(error.value)
    if "needs" not in says:
        with pytest.raises(ValueError, match=says):
            iou.check(**kwargs)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "left",
        "null",
        "[]",
        "[[]]",
        "[1, 2, 3]",
        "[[1, 2, 3, 4], [1]]",
        "[3, 4, 1, 2]",
        "[900, 0, 950, 5]",
        f"[1, 2, 3, 1{'0' * 500}]",
        "[" * 100000,
    ],
)
def test_a_row_whose_answer_is_no_box_is_an_error_of_that_row(answer: str) -> None:
    sizes = [[[WIDTH, HEIGHT]]] * 2
    error, reward = iou(["[1, 2, 3, 4]"] * 2, [answer, "[1, 2, 3, 4]"], image_sizes=sizes)
    assert isinstance(error, ValueError)
    assert "write [x1, y1, x2, y2]" in str(error)
    assert reward == 1.0


def test_a_reference_box_without_area_is_an_error_of_its_row() -> None:
    with pytest.raises(ValueError, match="write"):
        score("[1, 2, 3, 4]", [[1, 2, 3, 4], [3, 4, 1, 2]])


def test_a_row_without_an_image_is_an_error_of_this_row_alone() -> None:
    rewards = iou(["[0, 0, 500, 1000]"] * 3, ["[0, 0, 5, 10]"] * 3, [None, [], [[10, 10]]], coordinates="thousandths")
    assert [str(error) for error in rewards[:2]] == ["coordinates=thousandths needs image_sizes of every row"] * 2
    assert rewards[2] == 1.0


def test_conversational_completions_are_read() -> None:
    assert iou([[{"role": "assistant", "content": "[1, 2, 3, 4]"}]], ["[1, 2, 3, 4]"]) == [1.0]


def test_boxes_are_read_in_their_order() -> None:
    assert read_boxes('[{"bbox_2d": [1, 2, 3, 4]}, (5,6),(7,8)').tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
