"""Times and paths as people say them."""

import os


def spoken(seconds: float) -> str:
    """Return a time in the unit that people would use."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}" if seconds < 100 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"


def shown(path: str | os.PathLike) -> str:
    """Return a path for people: relative within the current folder, absolute elsewhere."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative
