"""Images of problems, from files and columns to what the policy sees."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from PIL import Image
from transformers import LlavaProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl import prepare_multimodal_messages

from grpo.builtin.tasks.calculator import calculator
from grpo.builtin.tasks.shapes import rows
from grpo.data.images import prompt_lengths
from grpo.data.task import load_task, reward_columns
from grpo.extras.builtin_policies.build import vision_processor
from grpo.utils.errors import ConfigError
from grpo.view.images import View, engine_options, images_in

TASK = ["task=shapes", "task.dataset.size=6", "task.eval.size=2"]


@pytest.fixture(scope="module")
def processor() -> LlavaProcessor:
    return vision_processor()


def picture(width: int = 40, height: int = 30, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def as_bytes(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def task_of(composed: Callable[..., DictConfig], folder: Path, cells: list[Any], *overrides: str) -> DictConfig:
    """A task of a Parquet file with a column of images."""
    problems = [{"pictures": cell, "question": f"How many? {row}", "answer": "3"} for row, cell in enumerate(cells)]
    file = folder / "problems.parquet"
    Dataset.from_list(problems).to_parquet(file)
    named = [f"task.dataset.path={file}", "task.images=pictures", f"task.image_folder={folder}"]
    return composed("task=jsonl", "task.split=train", "task.eval.size=0", *named, *overrides).task


def test_the_built_in_task_shows_each_problem_its_picture(composed: Callable[..., DictConfig], processor: Any) -> None:
    problems = load_task(composed(*TASK).task, processor)
    expected = rows("train", 6, 0)
    assert [row["images"][0].tobytes() for row in problems.train] == [row["image"].tobytes() for row in expected]
    assert problems.train[0]["prompt"] == [{"role": "user", "content": expected[0]["question"]}]
    assert problems.train[0]["shown_sizes"] == [[96, 96]]
    assert "images" not in reward_columns(problems.train), "they stay in this process"
    assert (problems.counts["train"]["used"], problems.counts["train"]["held_out"]) == (6, 0)


def test_what_is_held_out_is_known_by_its_picture_too(composed: Callable[..., DictConfig], processor: Any) -> None:
    problems = load_task(composed(*TASK, "task.eval.split=train").task, processor)
    assert problems.counts["train"]["held_out"] == 2


@pytest.mark.parametrize("kind", ["path", "bytes", "picture"])
@pytest.mark.parametrize("several", [False, True])
def test_images_come_from_files_bytes_and_pictures_or_none(
    kind: str, several: bool, tmp_path: Path, composed: Callable[..., DictConfig], processor: Any
) -> None:
    image = picture()
    image.save(tmp_path / "a.png")
    cell = {"path": "a.png", "bytes": as_bytes(image), "picture": image}[kind]
    cells = [[cell, cell], [cell], []] if several else [cell, cell, None]
    task = task_of(composed, tmp_path, cells)
    problems = load_task(task, processor).train
    assert [len(row["images"]) for row in problems] == ([2, 1, 0] if several else [1, 1, 0])
    assert problems[0]["images"][0].tobytes() == image.tobytes()
    assert problems[1]["image_sizes"] == [[40, 30]]


def test_a_photo_is_upright_and_has_three_colours(tmp_path: Path, composed: Any, processor: Any) -> None:
    turned = Image.Exif()
    turned[274] = 6
    cells = [as_bytes(picture(40, 30), "JPEG", exif=turned), as_bytes(picture(40, 30, "LA"))]
    problems = load_task(task_of(composed, tmp_path, cells), processor).train
    assert [(row["images"][0].size, row["images"][0].mode) for row in problems] == [
        ((30, 40), "RGB"),
        ((40, 30), "RGB"),
    ]


def gif() -> bytes:
    return as_bytes(picture(), "GIF", save_all=True, append_images=[picture(41, 30).resize((40, 30))])


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("none.png", "row 1 of train: there is no file {folder}/none.png"),
        (as_bytes(picture())[:200], "row 1 of train: "),
        (b"no image", "row 1 of train: cannot identify image file"),
        (gif(), "row 1 of train: animated, with 2 images"),
        (as_bytes(picture(1, 1)), "row 1 of train: 1 x 1 pixels; a side has 2 to 16,384"),
        (as_bytes(picture(20_000, 4)), "row 1 of train: 20000 x 4 pixels"),
        (7, "row 0 of train: int, not a path, bytes or an image"),
    ],
    ids=["missing", "cut", "no image", "animated", "one pixel", "wide", "a number"],
)
def test_an_image_that_cannot_be_shown_is_one_line(
    cell: Any, says: str, tmp_path: Path, composed: Any, processor: Any
) -> None:
    picture().save(tmp_path / "a.png")
    first = {str: "a.png", bytes: as_bytes(picture()), int: 3}[type(cell)]
    with pytest.raises(ConfigError) as raised:
        load_task(task_of(composed, tmp_path, [first, cell]), processor)
    assert f"task.images=pictures: {says.format(folder=tmp_path)}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_column_and_a_model_without_images_are_one_line(tmp_path: Path, composed: Any, processor: Any) -> None:
    with pytest.raises(ConfigError, match=r"task\.images=photos: the data has no such column; it has: image, question"):
        load_task(composed(*TASK, "task.images=photos").task, processor)
    with pytest.raises(ConfigError, match=r"task\.images=image: the model takes text alone"):
        load_task(composed(*TASK).task, processor.tokenizer)


def test_images_that_leave_no_room_are_one_line(composed: Any, processor: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        load_task(composed(*TASK, "task.max_prompt_length=12").task, processor)
    says = (
        "task.images: row 0 of train: images of 96 x 96 pixels are 16 tokens, with 7 of text more than "
        "task.max_prompt_length=12"
    )
    assert str(raised.value) == f"{says}: task.max_prompt_length=23 fits"


def test_a_chat_template_that_shows_no_image_is_one_line(composed: Any) -> None:
    processor = vision_processor()
    processor.chat_template = "{% for message in messages %}{{ message['content'][-1]['text'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="the model's chat template does not show its images"):
        load_task(composed(*TASK).task, processor)


def test_prompts_are_as_long_as_the_processor_makes_them(tmp_path: Path, composed: Any, processor: Any) -> None:
    cells = [[picture(), picture()], [picture()], []]
    problems = load_task(task_of(composed, tmp_path, cells), processor).train
    prompts = [prepare_multimodal_messages(row["prompt"], row["images"]) for row in problems]
    ids = processor.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]
    view = View(processor, None, None, None)
    assert prompt_lengths(problems, view, 512, "train") == [len(row) for row in ids] == [37, 21, 5]


def test_prompts_with_images_are_longer_by_their_tools(tmp_path: Path, composed: Any) -> None:
    processor = vision_processor()
    processor.chat_template += "{% for tool in tools or [] %}{{ tool['function']['name'] }} is a tool{% endfor %}"
    task = task_of(composed, tmp_path, [[picture()], []])
    problems, view = load_task(task, processor).train, View(processor, None, None, None)
    prompts = [prepare_multimodal_messages(row["prompt"], row["images"]) for row in problems]
    how: dict[str, Any] = {"tools": [calculator], "add_generation_prompt": True, "tokenize": True, "return_dict": True}
    expected = [len(row) for row in processor.apply_chat_template(prompts, **how)["input_ids"]]
    assert prompt_lengths(problems, view, 512, "train", [calculator]) == expected
    task.max_prompt_length = max(expected) - 1
    with pytest.raises(ConfigError, match=r"row 0 of train: images of 40 x 30 pixels"):
        load_task(task, processor, [calculator])
    load_task(task, processor)


@settings(max_examples=40, deadline=None)
@given(st.integers(20, 900), st.integers(20, 900), st.sampled_from([None, 50_000, 200_000]))
def test_the_policy_sees_an_image_as_qwens_processor_shows_it(width: int, height: int, pixels: int | None) -> None:
    images = Qwen2VLImageProcessorPil()
    view: Any = View(SimpleNamespace(image_processor=images), None, None, pixels)
    shown = view.show(picture(width, height))
    _, high, wide = images(images=[picture(width, height)])["image_grid_thw"][0]
    assert shown.size == (wide * 14, high * 14)
    assert shown.width * shown.height <= (pixels or 10**9)
    again = Qwen2VLImageProcessorPil()(images=[shown])["image_grid_thw"][0]  # an engine's, with its own limits
    assert list(again) == [1, high, wide]


def test_the_limit_of_pixels_is_saved_with_the_processor(tmp_path: Path) -> None:
    images = Qwen2VLImageProcessorPil()
    View(SimpleNamespace(image_processor=images), None, None, 50_000)  # type: ignore[arg-type]
    images.save_pretrained(tmp_path)
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).size.longest_edge == 50_000


def test_other_images_are_scaled_within_the_limits(processor: Any) -> None:
    view = View(processor, None, 2_000, 10_000)
    assert view.size(200, 100) == (141, 70)
    assert view.size(20, 20) == (44, 44)
    assert view.size(80, 60) == (80, 60)


def test_an_engine_prepares_for_the_images_of_the_task(processor: Any) -> None:
    qwen: Any = SimpleNamespace(image_processor=Qwen2VLImageProcessorPil())
    View(qwen, None, 784, 50_000)
    limits = {"limit_mm_per_prompt": {"video": 0, "image": 3}}
    assert engine_options(qwen, 3) == limits | {"mm_processor_kwargs": {"min_pixels": 784, "max_pixels": 50_000}}
    assert engine_options(processor, 3) == limits
    assert engine_options(processor, None) == {"limit_mm_per_prompt": {"video": 0}}
    assert engine_options(processor.tokenizer, 3) == {}


def test_images_of_a_conversation_come_in_their_order() -> None:
    first, second = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    prompt = [
        {"role": "user", "content": [{"type": "image", "image": first}, {"type": "text", "text": "and"}]},
        {"role": "user", "content": [{"type": "image", "image": second}]},
    ]
    assert images_in(prompt) == [first, second]
    assert images_in([{"role": "user", "content": "none"}]) == []
