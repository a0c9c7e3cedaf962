"""The LLM judge, against a server on this machine that speaks the protocol of OpenAI."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rewards.isolation.reward import Reward

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.slow


class Judge(BaseHTTPRequestHandler):
    asked: list[dict[str, Any]] = []  # noqa: RUF012
    failures = 0
    at_once = most_at_once = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Judge.lock:
            Judge.asked.append(body)
            Judge.at_once += 1
            Judge.most_at_once = max(Judge.most_at_once, Judge.at_once)
            fail = Judge.failures > 0
            Judge.failures -= fail
        threading.Event().wait(0.05)
        content = body["messages"][0]["content"]
        reply = (
            "I cannot say." if "unclear" in content else "It is right. Score: 9" if "#### 5" in content else "Score: 2"
        )
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply}}]
        text = json.dumps(answer).encode()
        with Judge.lock:
            Judge.at_once -= 1
        self.send_response(503 if fail else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reward]:
    Judge.asked, Judge.failures, Judge.most_at_once = [], 0, 0
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kwargs = {"model": "a-judge", "base_url": f"http://127.0.0.1:{server.server_port}/v1", "at_once": 4, "retries": 2}
    reward = Reward("rewards.judge.judge", "judge", kwargs)
    yield reward
    reward.close()
    server.shutdown()


def test_each_completion_is_judged_with_its_own_reference(judge: Reward) -> None:
    rewards = judge.score(prompts=["2 + 3?", "1 + 1?"], completions=["#### 5", "#### 3"], answer=["5", "2"])
    assert rewards == [0.9, 0.2]
    contents = sorted(body["messages"][0]["content"] for body in Judge.asked)
    assert all(text in contents[1] for text in ("2 + 3?", "#### 5", "Reference answer: 5"))
    assert {body["model"] for body in Judge.asked} == {"a-judge"}


def test_requests_go_out_beside_each_other_but_not_all_at_once(judge: Reward) -> None:
    assert judge.score(prompts=["?"] * 12, completions=["#### 5"] * 12) == [0.9] * 12
    assert 2 <= Judge.most_at_once <= 4


def test_a_request_that_fails_is_made_again(judge: Reward) -> None:
    Judge.failures = 2
    assert judge.score(prompts=["?"], completions=["#### 5"]) == [0.9]
    assert len(Judge.asked) == 3


def test_a_reply_without_a_score_skips_its_completion_alone(judge: Reward) -> None:
    assert judge.score(prompts=["?", "?"], completions=["unclear", "#### 5"]) == [None, 0.9]
    assert judge.errors == {"ValueError": 1}


def test_an_absent_server_is_an_error_per_completion_and_no_zero() -> None:
    kwargs = {"model": "a-judge", "base_url": "http://127.0.0.1:9/v1", "retries": 0}
    reward = Reward("rewards.judge.judge", "judge", kwargs)
    assert reward.score(prompts=["?"], completions=["#### 5"]) == [None]
    assert reward.errors.total() == 1
