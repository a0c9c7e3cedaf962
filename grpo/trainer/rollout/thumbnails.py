"""Images of logged completions, reduced to small files that the page of a run can show."""

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from grpo.utils.atomic import atomic

COLUMN = "thumbnails"
"""Column of the logged completions: for each of its images the name of the file in `completions/images/`."""
SIDE = 256
"""Pixels of the longest side of a file's image; smaller images keep their size."""
QUALITY = 80
"""Quality of JPEG, 1 to 95; an image takes about 10 kB."""
MAX_BYTES = 256 * 1024**2
"""Bytes of all files of a run."""


class Thumbnails:
    """Writes each image once, named after its pixels, so that processes and resumed runs name it alike.

    Disk use is bounded: at step 30 of 100 the files may have taken 30 % of `MAX_BYTES`, divided among the processes,
    so that also a run whose images do not all fit keeps some of each step. An image without a file is named all the
    same.

    Args:
        folder: of the files.
        processes: that write into it.
    """

    def __init__(self, folder: Path, processes: int = 1) -> None:
        self.folder, self.limit = folder, MAX_BYTES / processes
        self.used = sum(file.stat().st_size for file in folder.glob("*.jpg")) / processes
        """Bytes of this process's files."""

    def keep(self, images: Iterable[Image.Image], progress: float) -> list[str]:
        """Write the images of a prompt that have no file yet, and return their names.

        Args:
            images: RGB.
            progress: part of the run that is over after this step, 0 to 1.
        """
        return [self._keep(image, progress) for image in images]

    def _keep(self, image: Image.Image, progress: float) -> str:
        pixels = hashlib.sha256(f"{image.size}".encode())
        pixels.update(image.tobytes())
        file = self.folder / f"{pixels.hexdigest()[:32]}.jpg"
        if self.used < self.limit * progress and not file.exists():
            content = reduced(image)
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic(file) as partial:
                partial.write_bytes(content)
            self.used += len(content)
        return file.name


def reduced(image: Image.Image) -> bytes:
    """Return an image with at most `SIDE` pixels a side as JPEG, without anything but its pixels."""
    scale = min(1.0, SIDE / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    small = image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
    small.info = {}  # comments and profiles of any size
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def strip_images(rows: list[dict[str, Any]], prompts: list) -> None:
    """Take the images out of the prompts of rows, or of observations, that have any, in place: that list is logged."""
    contents = (turn.get("content") for prompt in prompts if not isinstance(prompt, str) for turn in prompt)
    parts_of = (part for content in contents if isinstance(content, list) for part in content)
    if {"image", "images"} & rows[0].keys() or any("image" in part for part in parts_of):
        prompts[:] = map(without_images, prompts)


def without_images(prompt: Any) -> Any:
    """Return a prompt whose contents are lists of parts, with the places of images but not these; a text as it is.

    A table cannot have texts in some rows and lists in others, and a checkpoint holds no images.
    """
    return prompt if isinstance(prompt, str) else [{**turn, "content": parts(turn.get("content"))} for turn in prompt]


def parts(content: Any) -> Any:
    """Return the content of a message as a list of parts, without images."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content and [{"type": "image"} if part["type"] == "image" else part for part in content]
