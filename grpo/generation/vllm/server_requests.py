"""Requests to a vLLM server that threads send while the policy trains, and that can be aborted."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

from grpo.generation.vllm.server import LAUNCHER
from grpo.utils.errors import GenerationError, described

AGAIN = f"start it again with {LAUNCHER}"


class ServerRequests:
    """Sends the requests of a client; those with an id in their `generation_kwargs` can be aborted.

    Args:
        client: TRL's `VLLMClient`.
    """

    def __init__(self, client: Any) -> None:
        self._client, self._generate = client, client.generate
        self._lock = threading.Lock()
        self._running: dict[str, int] = {}
        """Number of prompts of each request with an id."""
        self._aborted: set[str] = set()
        self._open = threading.Event()
        """Clear while weights are sent: requests of threads wait, those that are between two turns as well."""
        self._open.set()

    def generate(self, **request: Any) -> dict[str, Any]:
        """Return completions as the client does.

        Raises:
            GenerationError: the request has been aborted.
        """
        name = (request.get("generation_kwargs") or {}).get("request_id")
        if name is None:
            return self._generate(**request)
        self._begin(name, len(request["prompts"]))
        try:
            completions = self._generate(**request)
        finally:
            with self._lock:
                del self._running[name]
        if name in self._aborted:  # and its completions are truncated
            raise GenerationError(f"{name} has been aborted")
        return completions

    def _begin(self, name: str, count: int) -> None:
        """Count a request of so many prompts as running, once no weights are being sent."""
        while True:
            self._open.wait()
            with self._lock:
                if name in self._aborted:
                    raise GenerationError(f"{name} has been aborted")
                if self._open.is_set():
                    self._running[name] = count
                    return

    def abort(self, name: str) -> None:
        """Have the server stop a request, and refuse later ones with the same id."""
        with self._lock:
            self._aborted.add(name)
            count = self._running.get(name, 0)
        if count:
            ids = [f"cmpl-{name}-{number}" for number in range(count)]  # as vLLM names the prompts of a request
            self._client.session.post(f"{self._client.base_url}/abort_requests", json={"request_ids": ids})

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, no token is generated; running requests continue with the weights that the server has then."""
        with self._lock:
            self._open.clear()
            running = bool(self._running)
        try:
            if running:
                self._post("pause?mode=keep")
            yield
            if running:  # their keys and values are of other weights
                self._post("reset_prefix_cache?reset_running_requests=true")
        finally:
            try:
                if running:
                    self._post("resume")
            finally:
                self._open.set()

    def _post(self, path: str) -> None:
        self._client.session.post(f"{self._client.base_url}/{path}").raise_for_status()


@contextmanager
def explained(engine: Any, what: str) -> Iterator[None]:
    """Raise a `GenerationError` with the reason where vLLM fails inside; `what` says what it did."""
    try:
        yield
    except GenerationError:
        raise
    except requests.exceptions.RetryError as error:
        url = engine.vllm_client.base_url
        raise GenerationError(f"the vLLM server at {url} failed while it {what}; its log says why") from error
    except requests.RequestException as error:
        url = engine.vllm_client.base_url
        reason = f"the vLLM server at {url} went away while it {what} ({type(error).__name__}): {AGAIN}"
        raise GenerationError(reason) from error
    except Exception as error:
        raise GenerationError(f"vLLM failed while it {what}: {described(error)}") from error
