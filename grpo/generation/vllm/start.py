"""The start of a colocated vLLM, which may take a minute: its parts, as vLLM logs them."""

import logging
from types import TracebackType

from rich.console import Console

from grpo.utils.waiting import Waiting

STAGES = {
    "Starting to load model": "loading weights",
    "Model loading took": "compiling and profiling",
    "GPU KV cache size": "recording CUDA graphs",
    "Warming up model": "warming up",
    "Graph capturing finished": "warming up",
}
"""The part of vLLM's start that begins, by a text in vLLM's log."""


class EngineStart(logging.Handler):
    """While inside, the parts of vLLM's start are shown, as it logs them.

    vLLM keeps what it has compiled in its cache (`VLLM_CACHE_ROOT`), which a later start of the same model reads.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.waiting = Waiting(console, "starting the engine")  # which may be one of your own

    def __enter__(self) -> None:
        logging.getLogger("vllm").addHandler(self)
        self.waiting.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        logging.getLogger("vllm").removeHandler(self)
        self.waiting.__exit__(kind, error, trace)

    def emit(self, record: logging.LogRecord) -> None:
        """Show the part that begins with a message."""
        message = record.getMessage()
        if part := next((part for text, part in STAGES.items() if text in message), None):
            self.waiting.begin(part)
