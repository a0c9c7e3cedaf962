"""A list of a folder's files with size and checksum, written last: only a folder that matches its list is complete."""

import hashlib
import json
from pathlib import Path

import xxhash

from grpo.utils.atomic import atomic, flush

MANIFEST = "manifest.json"


def seal(folder: Path) -> None:
    """Write the manifest of a folder after everything in it has reached the disk."""
    for left in folder.glob(f"{MANIFEST}*"):  # of a process that was killed here
        left.unlink()
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    content = {str(file.relative_to(folder)): [file.stat().st_size, checksum(file)] for file in files}
    for path in [*files, *{file.parent for file in files}]:
        flush(path)
    with atomic(folder / MANIFEST) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def is_sealed(folder: Path) -> bool:
    """Return whether a folder has been written to its end, whatever has happened to it since."""
    return (folder / MANIFEST).is_file()


def difference(folder: Path) -> str | None:
    """Return how a sealed folder differs from its manifest, in words; None if it does not."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, digest) in content.items():
            file = folder / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if checksum(file) != digest:
                return f"{name} has other content than was written"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return None


def checksum(file: Path) -> str:
    """Return the XXH3 checksum of a file, at several GB per second."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()
