"""Images of problems: the column of a data set is checked, and the prompts that show it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset, List
from datasets import Image as ImageFeature
from PIL import Image
from rich.progress import track
from trl import prepare_multimodal_messages

from grpo.utils.errors import ConfigError
from grpo.view.images import COLUMN, View, images_of, unexpanded

if TYPE_CHECKING:
    from omegaconf import DictConfig

MANY = 1000
"""Rows from which on checking them shows its progress."""


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
