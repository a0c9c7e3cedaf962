"""What the command lines share: one line on stderr for what is wrong, and an exit status."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from grpo.config.messages import explain
from grpo.config.schema import register
from grpo.errors import ConfigError, RunError

WANTS_TRACEBACK = "HYDRA_FULL_ERROR" in os.environ


def leave(error: Exception, program: str) -> NoReturn:
    """Say in one line on stderr what was wrong and exit: with 2 for wrong input, else with the run's status."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        message, status = explain(error), 2
    elif isinstance(error, ConfigError):
        message, status = str(error), 2
    elif isinstance(error, RunError):
        message, status = str(error), error.status
    elif isinstance(error, OSError):
        message, status = f"cannot write the run directory: {error}; choose another with hydra.run.dir=…", 2
    else:
        message, status = f"{type(error).__name__}: {error}", 1
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(status)


def start(job: Callable[[], object], program: str) -> None:
    """Run a Hydra job as a command line. With HYDRA_FULL_ERROR=1 errors come with their traceback."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises, instead of printing and leaving
    register()
    try:
        job()
    except BrokenPipeError:  # whoever read the output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        leave(RunError("interrupted", status=130), program)
    except Exception as error:
        if WANTS_TRACEBACK:
            raise
        leave(error, program)


@contextlib.contextmanager
def output_in(file: Path) -> Iterator[None]:
    """Send what the libraries print and warn where Hydra sends what they log, so that the terminal shows the run."""
    import datasets
    import transformers

    for library in (transformers, datasets):
        library.utils.logging.disable_progress_bar()
        library.utils.logging.enable_propagation()
    transformers.utils.logging.disable_default_handler()
    logging.captureWarnings(True)
    with file.open("a", buffering=1) as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield
