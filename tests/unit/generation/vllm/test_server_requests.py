"""Requests of threads to a server, while weights are sent to it."""

from threading import Thread
from types import SimpleNamespace
from typing import Any

from grpo.generation.vllm.server_requests import ServerRequests


def test_a_request_waits_while_weights_are_sent() -> None:
    said: list[str] = []

    def note(what: str, answer: Any = None) -> Any:
        said.append(what)
        return answer

    answered = SimpleNamespace(raise_for_status=lambda: None)
    session = SimpleNamespace(post=lambda url, **options: note(url.rpartition("/")[2], answered))
    client = SimpleNamespace(base_url="", session=session, generate=lambda **request: note("generate", {}))
    requests = ServerRequests(client)

    def ask() -> None:
        requests.generate(prompts=[[1]], generation_kwargs={"request_id": "rollouts-1"})

    ask()  # the first turn, whose tools run now
    with requests.paused():
        thread = Thread(target=ask, daemon=True)
        thread.start()
        thread.join(0.2)
        note("sent")
    thread.join(10)
    assert said == ["generate", "sent", "generate"], "no request runs, so that the server needs no pause"
