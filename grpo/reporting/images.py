"""The images on the page of a run: small files of `completions/images/`, embedded, as many as a page can hold."""

import base64
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL import Image

MAX_IMAGES = 300
"""Images on a page."""
MAX_BYTES = 4_000_000
"""Bytes of all images on a page, as they are written there."""
MAX_FILE = 200_000
"""Bytes of a file."""
MAX_SIDE = 256
"""Pixels of a side."""
SHOWN_SIDE = 192
"""Pixels of the longest side to which the page enlarges smaller images."""
NAME = re.compile(r"[0-9a-f]{32}\.jpg")


def embed(steps: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Put a place in the returned list of images, or None, where groups of completions name files.

    Each file is embedded once. If they do not all fit, each step has the images of its first groups.

    Returns:
        `images`, each with `data` (a JPEG file in base64), `width` and `height` (pixels on the page), and how many
        images are `missing`.
    """
    embedded: list[dict[str, Any]] = []
    places: dict[str, int | None] = {}
    size = 0
    # the first groups of each step, then the second ones, and so on
    rounds = zip_longest(*(step["groups"] for step in steps))
    for group in (one for groups in rounds for one in groups if one and "images" in one):
        for name in group["images"]:
            if name not in places:
                found = read(folder, name) if len(embedded) < MAX_IMAGES else None
                fits = found is not None and size + len(found["data"]) <= MAX_BYTES
                places[name] = len(embedded) if fits else None
                if found and fits:
                    size += len(found["data"])
                    embedded.append(found)
        group["images"] = [places[name] for name in group["images"]]
    return {"images": embedded, "missing": sum(place is None for place in places.values())}


def names_of(cell: Any) -> list[str]:
    """Return the names of files in a row's cell; a column of the data may have the same name."""
    return [name for name in cell if isinstance(name, str) and NAME.fullmatch(name)] if isinstance(cell, list) else []


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a file of a small JPEG image for the page; None if it is missing, broken or something else."""
    file = folder / name
    try:
        if file.stat().st_size > MAX_FILE:
            return None
        with Image.open(file, formats=["JPEG"]) as image:
            if max(image.size) > MAX_SIDE:
                return None
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    scale = max(1.0, SHOWN_SIDE / max(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    return {"data": base64.b64encode(file.read_bytes()).decode(), "width": width, "height": height}
