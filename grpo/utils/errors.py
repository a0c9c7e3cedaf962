"""The exceptions whose message is the line that the user reads."""


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
