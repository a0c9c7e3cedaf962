"""A judge that is a function, behind a server on this machine that speaks the protocol of OpenAI."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer:
    """Answers each request with `reply` of its content, one with "drip" byte by byte; use it as a context."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.failures = self.at_once = self.most_at_once = 0
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                with lock:
                    self.asked.append(body)
                    self.at_once += 1
                    self.most_at_once = max(self.most_at_once, self.at_once)
                    fail = self.failures > 0
                    self.failures -= fail
                threading.Event().wait(0.05)
                message = {"role": "assistant", "content": self.reply(body["messages"][0]["content"])}
                answer = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
                answer["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
                answer["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
                text = json.dumps(answer).encode()
                with lock:
                    self.at_once -= 1
                handler.send_response(503 if fail else 200)
                handler.send_header("Content-Type", "application/json")
                handler.send_header("Content-Length", str(len(text)))
                handler.end_headers()
                for part in [bytes([byte]) for byte in text] if "drip" in str(body["messages"]) else [text]:
                    handler.wfile.write(part)
                    threading.Event().wait(0.1 if len(part) == 1 else 0)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self) -> "JudgeServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
