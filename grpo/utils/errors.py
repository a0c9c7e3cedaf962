"""The exceptions whose message is the line that the user reads, and others in a line."""

import traceback


class ConfigError(ValueError):
    """Impossible input of the user; the message is a line with the remedy."""


class RunError(RuntimeError):
    """A run ended early; the message is a line with the reason, and `status` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class DoesNotFit(RuntimeError):
    """A single completion does not fit into memory; the message has the remedy."""


class GenerationError(RuntimeError):
    """vLLM failed; the message is a line with the reason and a remedy."""


class DirectoryLost(RunError):
    """The run directory has been removed or replaced; nothing may be written there any more."""


def described(error: BaseException) -> str:
    """Return the kind of an exception and its message in a line; where it was raised, if it has none."""
    message = " ".join(str(error).split())[:300]
    if not message and (places := traceback.extract_tb(error.__traceback__)):
        message = f"in {places[-1].name}, line {places[-1].lineno} of {places[-1].filename}"
    return f"{type(error).__name__}: {message or 'without a message'}"
