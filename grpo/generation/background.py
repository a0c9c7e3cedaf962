"""A vLLM server's next completions, made while the policy trains."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any


class BackgroundGeneration:
    """A client's `generate` that can start a request before the trainer needs its completions.

    A thread sends one request at a time; a later call with the same arguments returns its completions.

    Args:
        generate: `VLLMClient.generate`; it takes keyword arguments, including `prompts`.
    """

    def __init__(self, generate: Callable[..., dict[str, Any]]) -> None:
        self._generate = generate
        self._last, self._begun = dict[str, Any](), dict[str, Any]()  # requests
        self._completions: Future[dict[str, Any]] = Future()

    def begin(self, prompts: list[list[int]]) -> None:
        """Send prompts, with the sampling options of the last request."""
        self._begun, self._completions = self._last | {"prompts": prompts}, Future()
        Thread(target=self._complete, args=(self._begun, self._completions), daemon=True).start()

    def _complete(self, request: dict[str, Any], completions: Future) -> None:
        try:
            completions.set_result(self._generate(**request))
        except BaseException as error:  # for the thread that asks for them
            completions.set_exception(error)

    def wait(self) -> None:
        """Wait until the server has answered."""
        if self._begun:
            wait([self._completions])

    def forget(self) -> None:
        """Wait, and let nobody have the completions."""
        self.wait()
        self._begun = {}

    def generate(self, **request: Any) -> dict[str, Any]:
        """Return completions: those of the background request, if its arguments were the same.

        Raises:
            Exception: the client's exception, in the background or now.
        """
        self.wait()
        if request == self._begun:
            self._begun = {}
            return self._completions.result()
        self._last = request
        return self._generate(**request)
