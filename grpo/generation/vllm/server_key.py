"""The key of a vLLM server that other machines can reach.

vLLM itself checks `VLLM_API_KEY` under `/v1` only, and not at the addresses that replace weights.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
"""Environment variable of the server and of the run."""
MIDDLEWARE = f"{__name__}.KeyRequired"
"""Option of `vllm serve`."""
OPEN = "/health"
"""Address that answers without the key."""
Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


def headers() -> dict[str, str]:
    """Return the headers of a request to a server; without a key in the environment, none."""
    return {"Authorization": f"Bearer {os.environ[KEY]}"} if os.environ.get(KEY) else {}


class KeyRequired:
    """ASGI middleware that refuses every request without the key, except for health."""

    def __init__(self, app: App) -> None:
        self.app, self.expected = app, f"Bearer {os.environ[KEY]}".encode()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Pass a request on, or answer it with status 401; a WebSocket is closed."""
        authorization = dict(scope.get("headers") or ()).get(b"authorization", b"")
        is_open = scope["type"] == "lifespan" or scope.get("path") == OPEN
        if is_open or secrets.compare_digest(authorization, self.expected):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})
