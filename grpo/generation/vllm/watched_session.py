"""Requests and weights to a server that may hang: they end when it no longer answers."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import requests

from grpo.generation.vllm.server import answers
from grpo.generation.vllm.server_key import headers

log = logging.getLogger(__name__)
PAUSE = 5.0
"""Seconds between two questions whether the server is healthy."""
FAILURES = 3
"""Number of consecutive unanswered requests after which the server counts as gone."""
TRANSFER_SECONDS = 900
"""Limit on a transfer of weights to a server, seconds."""


class WatchedSession(requests.Session):
    """A session that raises `ConnectionError` once its server answers no health check; TRL's has no timeout.

    A timeout would have to be longer than the longest generation. So a request waits in a thread of its own for as long
    as the server is healthy.

    Args:
        base_url: of the server.
    """

    def __init__(self, base_url: str) -> None:
        super().__init__()
        self.headers.update(headers())
        self.base_url = base_url
        self._lock = threading.Lock()  # TRL sends many requests at once, and one of them asks for all
        self._asked = time.monotonic()
        self._failures = 0

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """Send a request and return the answer.

        Raises:
            requests.RequestException: it failed, or the server has stopped answering.
        """
        ended: Queue[requests.Response | Exception] = Queue()

        def send() -> None:
            try:
                ended.put(super(WatchedSession, self).request(*args, **options))
            except Exception as error:  # whatever it is, the caller gets it
                ended.put(error)

        thread = threading.Thread(target=send, daemon=True)  # which may never end
        thread.start()
        while thread.is_alive():
            thread.join(PAUSE)
            if thread.is_alive() and not self._is_alive():
                raise requests.ConnectionError(f"{self.base_url} has stopped answering")
        answer = ended.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _is_alive(self) -> bool:
        with self._lock:
            if time.monotonic() - self._asked >= PAUSE:
                self._failures = 0 if answers(self.base_url) else self._failures + 1
                self._asked = time.monotonic()
            return self._failures < FAILURES


@contextmanager
def aborted_where_gone(client: Any) -> Iterator[None]:
    """During a transfer of weights, abort it when the server is gone: NCCL would wait forever.

    Args:
        client: TRL's `VLLMClient`.
    """
    arrived, ending, until = threading.Event(), threading.Lock(), time.monotonic() + TRANSFER_SECONDS

    def watch() -> None:
        failures = 0
        while not arrived.wait(PAUSE):
            failures = 0 if answers(client.base_url) else failures + 1
            if failures == FAILURES or time.monotonic() > until:
                with ending:
                    if not arrived.is_set():  # meanwhile, and the communicator is for the next transfer
                        log.error("the server does not take the weights: aborting their transfer")
                        client.communicator.destroy()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with ending:
            arrived.set()
