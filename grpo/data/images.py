"""Images of problems: from a column of files, bytes or pictures to the policy's input."""

import hashlib
import io
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, List
from datasets import Image as ImageFeature
from PIL import Image, ImageOps
from rich.progress import track
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from trl import prepare_multimodal_messages

from grpo.data.prompts import template_errors
from grpo.utils.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

COLUMN = "images"
"""Column that TRL reads: the images of a prompt, in the order in which they are shown."""
MANY = 1000
"""Rows from which on checking them shows its progress."""
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


def view_of(task: "DictConfig", processor: Any) -> View | None:
    """Return how a task shows images to the policy, None if it has none; ConfigError if the model takes none."""
    if task.images is None:
        return None
    if not hasattr(processor, "image_processor"):
        raise ConfigError(f"task.images={task.images}: the model takes text alone; choose one that takes images")
    return View(processor, task.image_folder, task.min_pixels, task.max_pixels)


def is_unused(task: "DictConfig", model: "DictConfig", peft: "DictConfig | None", processor: Any) -> bool:
    """Return whether no image reaches the vision weights of a model that would train them.

    Raises:
        ConfigError: adapters on them are asked for by name, or the model takes no prompt without an image.
    """
    sees = hasattr(processor, "image_processor") and not task.images
    if sees:
        try:
            processor(text=["1"])
        except ValueError as error:
            raise ConfigError(f"{model.model_name_or_path}: task.images is not set: {error}") from error
    if sees and peft is not None and peft.get("vision"):
        raise ConfigError("peft.vision=true: task.images is not set, and no image would reach these adapters")
    return sees and peft is None and "vision" not in model.freeze


def with_sizes(dataset: Dataset, task: "DictConfig", view: View, split: str) -> Dataset:
    """Return a data set with the images in the column `images`, after opening every image.

    It also has `image_sizes` and `shown_sizes`: for each row lists of width and height, in the data and as the policy
    sees them.

    Raises:
        ConfigError: the column is missing or has no images, or an image cannot be opened or shown.
    """
    if task.images not in dataset.column_names:
        raise ConfigError(
            f"task.images={task.images}: the data has no such column; it has: {', '.join(dataset.column_names)}"
        )
    dataset = undecoded(dataset, task.images)
    sizes: dict[str, list[list[tuple[int, int]]]] = {"image_sizes": [], "shown_sizes": []}
    cells = track(dataset[task.images], "checking images", transient=True, disable=len(dataset) < MANY)
    for row, cell in enumerate(cells):
        try:
            original = [view.open(value).size for value in images_of(cell)]
            sizes["shown_sizes"].append([view.size(*size) for size in original])
        except ValueError as error:
            raise ConfigError(f"task.images={task.images}: row {row} of {split}: {error}") from error
        sizes["image_sizes"].append(original)
    dataset = dataset.rename_column(task.images, COLUMN) if task.images != COLUMN else dataset
    for name, values in sizes.items():
        dataset = dataset.add_column(name, values)
    return dataset


def prompt_lengths(dataset: Dataset, view: View, limit: int, split: str, tools: Sequence[Any] = ()) -> list[int]:
    """Return the tokens of the prompts of `with_sizes`, with their images and the descriptions of tools.

    Raises:
        ConfigError: a prompt is too long because of its images, or has more images than the model accepts.
    """
    if len(dataset) == 0:
        return []
    processor, sizes = view.processor, list(dataset["shown_sizes"])
    pairs = zip(dataset["prompt"], sizes, strict=True)
    prompts, lengths = [prepare_multimodal_messages(prompt, [None] * len(shown)) for prompt, shown in pairs], []
    for row, (ids, shown) in enumerate(zip(unexpanded(processor, prompts, tools), sizes, strict=True)):
        if ids.count(processor.image_token_id) != len(shown):
            raise ConfigError(f"task.images: row {row} of {split}: the model's chat template does not show its images")
        words = len(ids) - len(shown)
        lengths.append(words + sum(view.tokens(*size) for size in shown))
        if words + len(shown) <= limit < lengths[-1]:
            fewer = f"task.max_pixels={view.factor**2 * ((limit - words) // len(shown))} or " if view.factor > 1 else ""
            pixels = " and ".join(f"{width} x {height}" for width, height in shown)
            raise ConfigError(
                f"task.images: row {row} of {split}: images of {pixels} pixels are {lengths[-1] - words:,} tokens, "
                f"with {words} of text more than task.max_prompt_length={limit}: {fewer}"
                f"task.max_prompt_length={lengths[-1]} fits"
            )
    fullest = max(range(len(sizes)), key=lambda row: len(sizes[row]))
    check_processor(prompts[fullest], sizes[fullest], lengths[fullest], processor, tools)
    return lengths


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


def check_processor(
    prompt: list[dict[str, Any]], sizes: list[list[int]], length: int, processor: Any, tools: Sequence[Any] = ()
) -> None:
    """Raise a ConfigError unless a processor makes as many tokens of a prompt with blank images as are expected."""
    options = {"tools": list(tools) or None, "add_generation_prompt": True, "tokenize": False}
    (text,) = processor.apply_chat_template([prompt], **options)
    blank = [Image.new("RGB", (width, height)) for width, height in sizes]
    try:
        count = len(processor(text=[text], images=[blank] if blank else None)["input_ids"][0])
    except (ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"task.images: the model does not take {len(sizes)} images in a prompt: {error}") from error
    if count != length:
        raise ConfigError(f"task.images: the processor makes {count} tokens of a prompt that has to have {length}")


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


def undecoded(dataset: Dataset, column: str) -> Dataset:
    """Return a data set in which the images of a column are not opened, without other images."""
    features = dataset.features
    dataset = dataset.remove_columns([name for name in features if name != column and is_of_images(features[name])])
    raw = ImageFeature(decode=False)
    raw = List(raw) if isinstance(features[column], List) else raw
    return dataset.cast_column(column, raw) if is_of_images(features[column]) else dataset


def is_of_images(feature: Any) -> bool:
    """Whether a column has images, or lists of them."""
    return isinstance(feature.feature if isinstance(feature, List) else feature, ImageFeature)
