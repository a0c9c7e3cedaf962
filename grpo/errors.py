"""The exceptions whose message is the line that the user reads."""


class ConfigError(ValueError):
    """The user asked for something that cannot be; the message is one line that says what to change."""


class RunError(RuntimeError):
    """A run ended early; the message is one line that says why, and `status` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class DoesNotFit(RuntimeError):
    """One completion alone is too much for the memory; the message says what to change."""


class GenerationError(RuntimeError):
    """vLLM gave up; the message is one line that says why and what to do."""
