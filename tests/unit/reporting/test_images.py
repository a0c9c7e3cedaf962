"""Images on the page of a run, and boxes on them; `tests/e2e/test_page.py` looks at them in a browser."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest
from PIL import Image

from grpo.reporting import images
from grpo.reporting.completions import MAX_SIZE, as_data, sample, shortened
from grpo.reporting.images import MAX_BOXES, MAX_IMAGES, SHOWN_SIDE, coordinates, named_boxes, reference_boxes
from grpo.reporting.page import write_report
from grpo.reporting.render import SCRIPTS
from grpo.reporting.vega import javascript
from rewards.iou import iou
from tests.page_fixtures import HOSTILE, show_images, write_run

SIZES = {"image_sizes": [[[200, 100]]], "shown_sizes": [[[100, 50]]]}


def row(completion: str, **more: Any) -> dict[str, Any]:
    sizes = {"image_sizes": [[200, 100]], "shown_sizes": [[100, 50]]}
    return {"completion": completion, "answer": "[20, 10, 120, 60]", **sizes, **more}


def run_with_images(folder: Path, count: int, steps: int = 3, groups: int = 2, text: str = "", **more: Any) -> Path:
    show_images(write_run(folder, steps=steps, groups=groups, generations=4, text=text), count, **more)
    return folder


def groups_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [group for step in found["steps"] for group in step["groups"]]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


def test_each_group_has_its_images_and_each_is_embedded_once(composed: Any, tmp_path: Path) -> None:
    names = show_images(write_run(tmp_path / "run", steps=3, groups=2, generations=4), 3, per_prompt=2)
    found = sample(tmp_path / "run", {"correctness": 1.0}, "correctness")
    assert [group["images"] for group in groups_of(found)] == [[0, 1], [2, 0], [1, 2]] * 2
    files = [(tmp_path / "run" / "completions" / "images" / name).read_bytes() for name in names]
    assert sorted(base64.b64decode(image["data"]) for image in found["images"]) == sorted(files)
    assert (found["missing"], found["boxes"]) == (0, False)


def test_the_page_has_the_images_and_may_load_nothing_else(composed: Any, tmp_path: Path) -> None:
    page = write_report(run_with_images(tmp_path / "run", 3)).read_text()
    assert len(data_of(page)["images"]) == 3
    assert "default-src 'none'; img-src data:; style-src" in page
    assert "are not on this page" not in page
    assert "correct boxes" not in page


KEYS = {"text", "row", "reward", "rewards", "advantage", "correct", "failed"}


def test_the_page_of_a_run_without_images_is_as_before(composed: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, groups=2, generations=4)
    data = data_of(write_report(folder).read_text())
    assert data["images"] == []
    assert set(data["steps"][0]["groups"][0]) == {"prompt", "answer", "size", "completions"}
    assert set(data["steps"][0]["groups"][0]["completions"][0]) == KEYS


@pytest.mark.parametrize("cells", [[3], ["https://nowhere/a.jpg"], [["../../secret.jpg", 5, None]], [None], [[]]])
def test_a_data_column_with_the_name_of_ours_shows_nothing(composed: Any, tmp_path: Path, cells: list) -> None:
    folder = write_run(tmp_path / "run", steps=1, groups=1, generations=2)
    file = folder / "completions" / "completions_00001.parquet"
    table = pandas.read_parquet(file)
    cell = [str(value) for value in cells[0]] if isinstance(cells[0], list) else cells[0]
    table.assign(thumbnails=[cell] * len(table)).to_parquet(file)
    found = sample(folder, {"correctness": 1.0}, "correctness")
    assert ("images" in groups_of(found)[0], found["missing"]) == (False, 0)


def test_the_same_question_about_another_image_is_another_group(tmp_path: Path) -> None:
    (tmp_path / "completions").mkdir()
    names = [[f"{number:032x}.jpg"] for number in (1, 1, 2, 2)]
    rows = {"step": 1, "prompt": "How many?", "completion": list("abcd"), "correct": [0.0, 1.0] * 2}
    pandas.DataFrame({**rows, "thumbnails": names}).to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    found = groups_of(sample(tmp_path, {"correct": 1.0}, "correctness"))
    assert [[each["text"] for each in group["completions"]] for group in found] == [["b", "a"], ["d", "c"]]


def test_a_prompt_with_images_is_shown_as_text_and_places() -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "How many?"}]
    assert shortened([{"role": "user", "content": content}]) == "[image] How many?"
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert shortened([system, {"role": "user", "content": content}]) == "system: Be brief.\nuser: [image] How many?"


def test_a_page_limits_its_images_and_each_step_has_some(composed: Any, tmp_path: Path) -> None:
    folder = run_with_images(tmp_path / "run", MAX_IMAGES + 100, steps=50, groups=8)
    page = write_report(folder).read_text()
    data = data_of(page)
    assert len(data["images"]) == MAX_IMAGES
    assert f"100 of {MAX_IMAGES + 100} images of these completions are not on this page" in page
    for step in data["steps"]:
        assert [place is not None for group in step["groups"] for place in group["images"]][:6] == [True] * 6


def test_the_bytes_of_images_on_a_page_are_bounded(
    composed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_with_images(tmp_path / "run", 40, steps=20)
    whole = sum(len(image["data"]) for image in sample(folder, {}, "correctness")["images"])
    monkeypatch.setattr(images, "MAX_BYTES", whole // 2)
    found = sample(folder, {}, "correctness")
    assert whole / 3 < sum(len(image["data"]) for image in found["images"]) <= whole / 2
    assert found["missing"] == 40 - len(found["images"])
    assert found["steps"][0]["groups"][0]["images"] == [0]


@pytest.mark.parametrize("content", ["missing", "truncated", "page", "png", "long", "wide", "folder"])
def test_a_file_that_is_no_small_jpeg_is_not_embedded(composed: Any, tmp_path: Path, content: str) -> None:
    folder = run_with_images(tmp_path / "run", 2, steps=1)
    file = folder / "completions" / "images" / f"{0:032x}.jpg"
    whole, large = file.read_bytes(), io.BytesIO()
    file.unlink()
    if content == "png":
        Image.new("RGB", (8, 8)).save(file, "PNG")
    elif content == "folder":
        file.mkdir()
    elif content != "missing":
        Image.new("RGB", (1000, 8) if content == "wide" else (8, 8)).save(large, "JPEG")
        hostile = {"truncated": whole[:-100], "page": b"</script><script>alert(1)</script>"}
        file.write_bytes(hostile.get(content, large.getvalue() + b"\0" * (images.MAX_FILE * (content == "long"))))
    found = sample(folder, {}, "correctness")
    assert [group["images"] for group in groups_of(found)] == [[None], [0]]
    assert (found["missing"], len(found["images"])) == (1, 1)
    if content == "missing":
        assert "1 of 2 images of these completions are not on this page" in write_report(folder).read_text()


def test_small_images_are_enlarged_and_narrow_ones_keep_a_pixel(tmp_path: Path) -> None:
    for size, expected in {(8, 8): (192, 192), (256, 1): (256, 1), (2, 1): (192, 96), (200, 100): (200, 100)}.items():
        Image.new("RGB", size).save(tmp_path / "a.jpg")
        found = images.read(tmp_path, "a.jpg")
        assert found
        assert (found["width"], found["height"]) == expected
        assert max(expected) >= SHOWN_SIDE


def test_boxes_are_drawn_in_parts_of_the_image() -> None:
    assert reference_boxes(row("")) == [(0.1, 0.1, 0.5, 0.5)]
    written = '[{"bbox_2d": [20, 10, 120, 60], "label": "cat"}]'
    assert named_boxes(row(written), "original") == ([(0.1, 0.1, 0.5, 0.5)], 1)
    assert named_boxes(row("(10,5),(60,30)"), "shown") == ([(0.1, 0.1, 0.5, 0.5)], 1)
    assert named_boxes(row("[100, 100, 600, 600]"), "thousandths") == ([(0.1, 0.1, 0.5, 0.5)], 1)


@pytest.mark.parametrize("system", ["original", "shown", "thousandths"])
def test_a_box_drawn_on_the_correct_one_has_the_full_reward(system: str) -> None:
    written = {"original": "[20, 10, 120, 60]", "shown": "[10, 5, 60, 30]", "thousandths": "[100, 100, 600, 600]"}
    for text in (written[system], f"<think>[1, 2, 3, 4]</think><answer>{written[system]}</answer>"):
        (scored,) = iou([text], [row(text)["answer"]], **SIZES, coordinates=system)
        assert scored == 1.0
        assert named_boxes(row(text), system) == (reference_boxes(row(text)), 1)


@pytest.mark.parametrize(
    "written",
    [
        "[NaN, 0, 10, 10]",
        "[0, 0, Infinity, 10]",
        "[0, 0, 1e999, 10]",
        "[1e308, 1e308, 1e309, 1e309]",
        "[60, 60, 20, 20]",
        "[3000, 3000, 4000, 4000]",
        "[5, 5, 5, 5]",
        f"[{'9' * 5000}, 0, 1, 1]",
        "[" * 100_000,
        "</script>",
    ],
)
def test_boxes_without_an_area_in_the_image_are_not_drawn(written: str) -> None:
    for system in ("original", "shown", "thousandths"):
        assert named_boxes(row(written), system)[0] == []
        assert reference_boxes(row("", answer=written)) == []


def test_a_box_beyond_the_image_is_clipped_to_it() -> None:
    for text in ("[-1e308, -5, 1e308, 1e9]", "[0,0,200,100]"):
        assert named_boxes(row(text), "original") == ([(0.0, 0.0, 1.0, 1.0)], 1)
    assert reference_boxes(row("", answer="[0, 0, 1e9, 1e9]")) == [(0.0, 0.0, 1.0, 1.0)]


def test_of_very_many_boxes_the_first_are_drawn() -> None:
    drawn, named = named_boxes(row("[1, 2, 3, 4]" * 1000), "original")
    assert (len(drawn), named) == (MAX_BOXES, 1000)
    assert len(reference_boxes(row("", answer=json.dumps([[1, 2, 3, 4]] * 1000)))) == MAX_BOXES


@pytest.mark.parametrize(
    "sizes", [None, [], [[]], [[0, 5]], [[float("nan"), 5]], [[float("inf"), 5]], [["200", "100"]], [[1, 2, 3]], 7, "x"]
)
def test_boxes_of_rows_without_sizes_are_not_drawn(sizes: Any) -> None:
    assert reference_boxes(row("", image_sizes=sizes)) == []
    assert named_boxes(row("[1, 2, 3, 4]", image_sizes=sizes), "original") == ([], 1)
    assert named_boxes(row("[1, 2, 3, 4]", shown_sizes=sizes), "shown") == ([], 1)


def test_the_coordinates_are_those_of_the_reward(composed: Any) -> None:
    assert coordinates(composed("+reward=iou").reward) == "original"
    assert coordinates(composed("+reward=iou", "reward.iou.kwargs.coordinates=thousandths").reward) == "thousandths"
    assert coordinates(composed().reward) == "original"
    assert coordinates({"mine": {"kwargs": {"coordinates": ["polar"]}}, "other": {"kwargs": None}}) == "original"


def test_boxes_are_on_the_page_of_a_run_whose_answers_are_boxes(composed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    typed = ("+reward=iou", "reward.iou.kwargs.coordinates=shown")
    write_run(folder, steps=1, groups=1, generations=4, typed=typed)
    written = ["[10, 5, 60, 30]", "no idea", "[0, 0, 1, 1] [NaN, 1, 2, 3] [5, 5, 1, 1]", "[1, 2, 3, 4]" * 100]
    show_images(folder, 1, answer=["[20, 10, 120, 60]"], completion=written, **SIZES)
    page = write_report(folder).read_text()
    (group,) = data_of(page)["steps"][0]["groups"]
    by_text = {each["text"]: each for each in group["completions"]}
    assert group["boxes"] == [[0.1, 0.1, 0.5, 0.5]]
    assert by_text[written[0]]["boxes"] == group["boxes"]
    assert (by_text[written[1]]["boxes"], by_text[written[1]]["named"]) == ([], 0)
    assert (by_text[written[2]]["boxes"], by_text[written[2]]["named"]) == ([[0.0, 0.0, 0.01, 0.02]], 2)
    assert (len(by_text[written[3]]["boxes"]), by_text[written[3]]["named"]) == (MAX_BOXES, 100)
    assert "correct boxes, dashed" in page


def test_completions_of_a_task_without_boxes_have_none_drawn(composed: Any, tmp_path: Path) -> None:
    columns = {"answer": ["3"], "completion": ["[1, 2, 3, 4]"], **SIZES}
    found = sample(run_with_images(tmp_path / "run", 1, **columns), {}, "correctness")
    assert not found["boxes"]
    assert "boxes" not in groups_of(found)[0]["completions"][0]


def test_text_beside_an_image_is_no_markup(composed: Any, tmp_path: Path) -> None:
    text = " ".join(sorted(HOSTILE, key=len))
    columns = {"answer": ["[20, 10, 120, 60]"], **SIZES}
    page = write_report(run_with_images(tmp_path / "run", 2, text=text, **columns)).read_text()
    own = page.replace(javascript(), "").lower()
    assert own.count("<script") == own.count("</script") == len(SCRIPTS) + 7
    assert len(data_of(page)["images"]) == 2


def test_boxes_count_in_the_bound_of_a_page(composed: Any, tmp_path: Path) -> None:
    columns = {"answer": ["[20, 10, 120, 60]"], "completion": ["[1.23, 2.34, 33.3, 44.4]" * 100], **SIZES}
    folder = write_run(tmp_path / "run", steps=60, groups=4, generations=4)
    show_images(folder, 1, **columns)
    found = sample(folder, {}, "correctness")
    assert MAX_SIZE / 2 < len(as_data(found["steps"]).encode()) < MAX_SIZE + 100_000


def test_the_numbers_of_boxes_are_finite_for_any_boxes() -> None:
    random = numpy.random.default_rng(0)
    for exponents in random.uniform(-320, 320, (200, 4)):
        text = "[" + ", ".join(f"1e{int(exponent)}" for exponent in exponents) + "]"
        for system in ("original", "shown", "thousandths"):
            drawn, _ = named_boxes(row(text), system)
            json.dumps(drawn, allow_nan=False)
            assert all(0 <= part <= 1 for box in drawn for part in box)
