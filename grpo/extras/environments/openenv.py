"""Environments that a server of OpenEnv runs (https://github.com/meta-pytorch/OpenEnv); see `task=openenv`.

It speaks OpenEnv's protocol itself: the package openenv needs versions of other packages that vLLM excludes.
"""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

PORTS = {"http": 80, "https": 443}
LIMIT = 60.0
"""Limit of a reply, seconds; a call has the limit `task.tool_timeout` as well."""


class OpenEnv:
    """A session at a server, whose tool is a step; its reward is the sum of an episode's rewards.

    Args:
        environment_id: address of the server, `http://localhost:8000`.
        action: name of the text in the environment's action, such as `message`.
        observation: name of the text in its observations; None shows all of them, as JSON.

    Raises:
        ValueError: no server answers at the address.
    """

    def __init__(self, environment_id: str, action: str = "message", observation: str | None = None) -> None:
        server = urlsplit(environment_id)
        if server.scheme not in PORTS or not server.hostname:
            raise ValueError(f"{environment_id}: the address of a server, such as http://localhost:8000")
        try:
            socket.create_connection((server.hostname, server.port or PORTS[server.scheme]), 10).close()
        except OSError as error:
            raise ValueError(f"no server answers at {environment_id}: {error}") from error
        self._address = f"{environment_id.rstrip('/').replace('http', 'ws', 1)}/ws"
        self._action, self._observation = action, observation
        self._session: ClientConnection | None = None
        self._total, self._ended = 0.0, True

    def reset(self, **columns: Any) -> str:
        """Begin an episode with the columns of a row and return the first observation."""
        row = {key: value for key, value in columns.items() if key != "prompt"}
        try:
            return self._begun(row)
        except ConnectionClosed:  # since the last episode: the server has started again, say
            return self._begun(row)

    def _begun(self, row: dict[str, Any]) -> str:
        if self._session is None:
            self._session = connect(self._address, open_timeout=LIMIT, max_size=None)
        self._total, self._ended = 0.0, False
        return f"\n{self._read('reset', row)}"

    def step(self, action: str) -> str:
        """Act in the environment and read what follows.

        Args:
            action: The action
        """
        if self._ended:
            raise ValueError("the episode has ended")
        return self._read("step", {self._action: action})

    def get_reward(self) -> float:
        """Return the sum of the rewards of the episode."""
        return self._total

    def _read(self, kind: str, data: dict[str, Any]) -> str:
        assert self._session is not None
        try:
            self._session.send(json.dumps({"type": kind, "data": data}))
            reply = json.loads(self._session.recv(LIMIT))
        except (ConnectionClosed, TimeoutError):  # a late reply would be taken for that to the next request
            self._session.close()
            self._session, self._ended = None, True
            raise
        if reply["type"] == "error":
            raise ValueError(reply["data"].get("message", "the server refused it"))
        result = reply["data"]
        self._total += float(result.get("reward") or 0.0)
        self._ended = bool(result.get("done"))
        seen = result["observation"]
        text = json.dumps(seen) if self._observation is None else str(seen[self._observation])
        return f"{text}\n{'The episode has ended.' if self._ended else ''}".strip()
