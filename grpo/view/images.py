"""Images as the policy sees them: resized like its processor, in conversations, and for an engine."""

import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset
from jinja2 import TemplateError
from PIL import Image, ImageOps
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from trl import prepare_multimodal_messages

from grpo.utils.errors import ConfigError

COLUMN = "images"
"""Column that TRL reads: the images of a prompt, in the order in which they are shown."""
SIDES = range(2, 16_385)
"""Pixels that a side of an image may have."""
MAX_RATIO = 200
"""Longest side over shortest; Qwen's processors refuse more."""


class View:
    """Images as the policy sees them: resized like its processor, within the pixels of the configuration.

    It resizes images before TRL and vLLM get them, so that the processors of both produce the same tokens. As a
    transform of a data set it opens the images of the rows that are read.

    `folder` has the files with relative paths. `min_pixels` and `max_pixels` are width times height of an image; None
    takes the processor's limit.
    """

    def __init__(self, processor: Any, folder: str | None, min_pixels: int | None, max_pixels: int | None) -> None:
        self.processor, self.folder = processor, Path(folder or "")
        self.factor, self.min_pixels, self.max_pixels = 1, min_pixels or 0, max_pixels or math.inf
        images = processor.image_processor
        if hasattr(images, "merge_size") and images.size.longest_edge:  # Qwen's: both edges are numbers of pixels
            self.factor = images.patch_size * images.merge_size
            self.min_pixels = min_pixels or images.size.shortest_edge
            self.max_pixels = max_pixels or images.size.longest_edge
            images.size = SizeDict(shortest_edge=self.min_pixels, longest_edge=self.max_pixels)  # saved with the model
        self.tokens = cache(self._tokens)
        """Function of width and height to the tokens of an image in a prompt."""

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of an image as the policy sees it, pixels; ValueError if no processor takes it."""
        if not {width, height} <= set(SIDES) or max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(
                f"{width} x {height} pixels; a side has {SIDES[0]} to {SIDES[-1]:,}, and at most {MAX_RATIO} times the "
                "pixels of the other"
            )
        if self.factor > 1:
            height, width = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
            return width, height
        pixels = width * height
        scale = math.sqrt(min(max(pixels, self.min_pixels), self.max_pixels) / pixels)
        return (width, height) if scale == 1 else (max(1, int(width * scale)), max(1, int(height * scale)))

    def open(self, value: Any) -> Image.Image:
        """Return a path, bytes (as in `datasets`) or picture as an upright RGB image; ValueError if it is no image."""
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        try:
            image: Any = value
            if isinstance(value, str):
                image = Image.open(self.folder / value)
            elif isinstance(value, bytes):
                image = Image.open(io.BytesIO(value))
            if not isinstance(image, Image.Image):
                raise ValueError(f"{type(value).__name__}, not a path, bytes or an image")
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise ValueError(f"animated, with {frames} images")
            return ImageOps.exif_transpose(image).convert("RGB")
        except FileNotFoundError:
            url = "; URLs are not read: name downloaded files" if "://" in str(value) else ""
            raise ValueError(f"there is no file {self.folder / value}{url}") from None
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            where = f"{self.folder / value}: " if isinstance(value, str) else ""
            raise ValueError(f"{where}{' '.join(str(error).split())}") from error

    def show(self, value: Any) -> Image.Image:
        """Return an image as the policy sees it."""
        image = self.open(value)
        size = self.size(*image.size)
        return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)

    def shown(self, rows: list[dict[str, Any]], opened: dict[str, Image.Image]) -> list[dict[str, Any]]:
        """Return rows with their images as the policy sees them, each opened once: `opened` has them by `_name`."""
        converted = []
        for row in rows:
            pictures = []
            for value in images_of(row.get(COLUMN)):
                if not isinstance(value, Image.Image):
                    name = _name(value)
                    value = opened.get(name) or opened.setdefault(name, self.show(value))
                pictures.append(value)
            converted.append({**row, COLUMN: pictures})
        return converted

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Open the images of rows that are read from the data set."""
        if COLUMN in rows:
            rows = {**rows, COLUMN: [[self.show(value) for value in images_of(cell)] for cell in rows[COLUMN]]}
        return rows

    def fields(self) -> set[str]:
        """Return the names of the tensors that the processor makes of an image, besides the tokens and their mask."""
        return self._process(64, 64).keys() - {"input_ids", "attention_mask"}

    def _tokens(self, width: int, height: int) -> int:
        return len(self._process(width, height)["input_ids"][0])

    def _process(self, width: int, height: int) -> Any:
        return self.processor(text=[self.processor.image_token], images=[[Image.new("RGB", (width, height))]])


def images_of(cell: Any) -> list[Any]:
    """Return the images of a row: none, one, or a list."""
    if cell is None:
        return []
    return [value for value in cell if value is not None] if isinstance(cell, list) else [cell]


def unexpanded(processor: Any, prompts: list[Any], tools: Sequence[Any] = (), **options: Any) -> list[list[int]]:
    """Return the tokens of conversations with one token per image, as an engine takes them with the images."""
    messages, tokenizer = [prepare_multimodal_messages(prompt) for prompt in prompts], processor.tokenizer
    options |= {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
    with template_errors():
        texts = processor.apply_chat_template(messages, **options)
    begun = tokenizer.bos_token is not None and texts[0].startswith(tokenizer.bos_token)  # as transformers decides
    return tokenizer(texts, add_special_tokens=not begun)["input_ids"]


def engine_options(processor: Any, most_images: int | None) -> dict[str, Any]:
    """Return vLLM's options for the images of a policy, so that the engine does not prepare for larger images.

    `most_images` is the largest number of images per prompt; None if unknown. A tokenizer has no images.
    """
    if not hasattr(processor, "image_processor"):
        return {}
    limits = {"video": 0} | ({"image": most_images} if most_images else {})
    options: dict[str, Any] = {"limit_mm_per_prompt": limits}
    images = processor.image_processor
    if hasattr(images, "merge_size") and images.size.longest_edge:  # Qwen's: both edges are numbers of pixels
        pixels = {"min_pixels": images.size.shortest_edge, "max_pixels": images.size.longest_edge}
        options["mm_processor_kwargs"] = pixels
    return options


def images_in(prompt: list[dict[str, Any]]) -> list[Any]:
    """Return the images of a conversation, in the order in which they are shown."""
    parts = [part for message in prepare_multimodal_messages(prompt) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def prompt_of(problem: dict[str, Any]) -> Any:
    """Return the prompt of a problem, its images in it."""
    shown = problem.get(COLUMN)
    return prepare_multimodal_messages(problem["prompt"], shown) if shown else problem["prompt"]


def names(problems: Dataset) -> list[list[str]]:
    """Return an identity of the images of each row: the digests of their files, or their paths."""
    raw = problems.with_format(None)[COLUMN]
    return [[_name(value) for value in images_of(cell)] for cell in raw]


def _name(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    return hashlib.sha256(value).hexdigest()[:24] if isinstance(value, bytes) else str(value)


@contextmanager
def template_errors() -> Iterator[None]:
    """Raise a ConfigError where a chat template refuses a prompt inside."""
    try:
        yield
    except (TemplateError, TypeError) as error:
        raise ConfigError(
            f"the model's chat template refuses a prompt of the task: {' '.join(str(error).split())}; try "
            "task.system_prompt=null, task.few_shot.examples=[] or task.conversational=false"
        ) from error
