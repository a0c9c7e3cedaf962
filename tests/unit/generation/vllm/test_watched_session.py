"""Requests to a server that hangs, and to one that is only slow."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from grpo.generation.vllm import watched_session
from grpo.generation.vllm.watched_session import WatchedSession


class Server(BaseHTTPRequestHandler):
    """Answers a POST after a second, or never; and whether it is healthy."""

    healthy = True
    hangs = False
    asked = 0
    released = threading.Event()

    def do_GET(self) -> None:
        Server.asked += 1
        self.send_response(200 if Server.healthy else 503)
        self.end_headers()

    def do_POST(self) -> None:
        Server.released.wait(60 if Server.hangs else 1)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(watched_session, "PAUSE", 0.1)
    monkeypatch.setattr(Server, "released", threading.Event())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    Server.released.set()
    server.shutdown()
    server.server_close()


def test_a_request_to_a_server_that_hangs_ends(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "hangs", True)
    monkeypatch.setattr(Server, "healthy", False)
    started = time.monotonic()
    with pytest.raises(requests.ConnectionError, match="has stopped answering"):
        WatchedSession(url).post(f"{url}/generate", json={})
    assert time.monotonic() - started < 20


def test_requests_to_a_slow_server_wait_and_share_health_checks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "asked", 0)
    session = WatchedSession(url)
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(session.post(f"{url}/generate", json={}).status_code))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert statuses == [200] * 8
    assert 1 <= Server.asked <= 15, "not one question for each request"


def test_an_error_of_the_request_itself_reaches_the_caller(url: str) -> None:
    with pytest.raises(requests.exceptions.InvalidURL):
        WatchedSession(url).get("http://")
