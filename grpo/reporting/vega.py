"""The JavaScript that draws the charts of a page: Vega, Vega-Lite and their interpreter, from the package vl-convert.

It becomes a part of the page, which loads nothing. To collect it takes seconds, so it is kept in the user's cache.
"""

import contextlib
import functools
import os
from importlib.metadata import version
from pathlib import Path

from grpo.utils.atomic import atomic


@functools.cache
def javascript() -> str:
    """Return the libraries as one script, which defines `vegaEmbed`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo"
    file = folder / f"vega-{version('vl-convert-python')}.js"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return file.read_text(encoding="utf-8")
    from vl_convert import javascript_bundle

    script = javascript_bundle()  # type: ignore[call-arg]  # of which its stubs know an argument more
    with contextlib.suppress(OSError):  # without a cache it is collected again
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(file) as partial:
            partial.write_text(script, encoding="utf-8")
    return script
