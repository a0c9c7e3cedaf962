"""Completions that are made before they are asked for."""

import threading
from typing import Any

import pytest

from grpo.generation.background import BackgroundGeneration


class Server:
    """A client of a server that answers when it is told to, and counts its requests."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.requests: list[dict[str, Any]] = []

    def generate(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        assert self.may_answer.wait(10)
        if request["prompts"] == [[0]]:
            raise ConnectionError("gone")
        return {"completion_ids": [[*ids, len(self.requests)] for ids in request["prompts"]]}


@pytest.fixture
def server() -> Server:
    server = Server()
    server.may_answer.set()
    return server


def test_what_was_begun_is_what_is_given_to_who_asks_for_it(server: Server) -> None:
    background = BackgroundGeneration(server.generate)
    assert background.generate(prompts=[[7]], temperature=1.0) == {"completion_ids": [[7, 1]]}
    server.may_answer.clear()
    background.begin([[8]])
    threading.Timer(0.1, server.may_answer.set).start()
    assert background.generate(prompts=[[8]], temperature=1.0) == {"completion_ids": [[8, 2]]}
    assert background.generate(prompts=[[8]], temperature=1.0) == {"completion_ids": [[8, 3]]}, "given once"
    assert [request["temperature"] for request in server.requests] == [1.0] * 3


def test_an_evaluation_in_between_gets_completions_of_its_own(server: Server) -> None:
    background = BackgroundGeneration(server.generate)
    background.generate(prompts=[[7]], temperature=1.0)
    background.begin([[8]])
    background.wait()
    assert background.generate(prompts=[[8]], temperature=0.0) == {"completion_ids": [[8, 3]]}
    assert background.generate(prompts=[[8]], temperature=1.0) == {"completion_ids": [[8, 2]]}


def test_no_other_request_goes_out_before_the_answer(server: Server) -> None:
    background = BackgroundGeneration(server.generate)
    server.may_answer.clear()
    background.begin([[8]])
    waiting = threading.Thread(target=background.wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    server.may_answer.set()
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_failure_is_told_to_who_asks_and_not_before(server: Server) -> None:
    background = BackgroundGeneration(server.generate)
    background.begin([[0]])
    background.wait()
    with pytest.raises(ConnectionError, match="gone"):
        background.generate(prompts=[[0]])
    assert background.generate(prompts=[[1]]) == {"completion_ids": [[1, 2]]}


def test_what_is_forgotten_is_generated_again(server: Server) -> None:
    background = BackgroundGeneration(server.generate)
    background.begin([[8]])
    background.forget()
    assert background.generate(prompts=[[8]]) == {"completion_ids": [[8, 2]]}
