"""Whose the terminal is."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import datasets
import transformers


@contextlib.contextmanager
def output_in(file: Path) -> Iterator[None]:
    """Send what the libraries print and warn where Hydra sends what they log, so that the terminal shows the run."""
    for library in (transformers, datasets):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.enable_propagation()
    transformers.utils.logging.disable_default_handler()
    logging.captureWarnings(True)
    with file.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield
