"""A vLLM server's next completions, made while the policy trains."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import Any


class BackgroundGeneration:
    """A client's `generate` that can also begin before its completions are asked for.

    A request goes out in a thread, one at a time; whoever asks for the same completions later gets those.

    Args:
        generate: `VLLMClient.generate`; it takes keyword arguments, `prompts` among them.
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
        """Return completions, those in the background if that was their request.

        Raises:
            Exception: what the client raised, in the background or now.
        """
        self.wait()
        if request == self._begun:
            self._begun = {}
            return self._completions.result()
        self._last = request
        return self._generate(**request)
