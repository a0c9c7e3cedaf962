"""The HTTP interface of the Hugging Face hub as its client uses it for uploads, on this machine.

Repositories are dictionaries; large files come by the LFS protocol, so the client needs HF_HUB_DISABLE_XET=1.
"""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WRITES, READS = "hf_" + "w" * 34, "hf_" + "r" * 34
"""Tokens that this hub knows, of the user `me`: one may write, the other may only read."""


class HubServer:
    """A hub with the repositories `repositories`: name -> {"private", "files", "commits"}; use it as a context."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Any]] = {}
        self.large: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.broken = False
        """Whether large files are refused."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.handle_request()

            do_GET = do_PUT = do_POST

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                path = self.path.partition("?")[0]
                server.asked.append(f"{self.command} {path}")
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, answer = server.answer(self.command, path, body, token)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, token: str | None) -> dict[str, str]:
        """Return the environment of a client of this hub, which has a token or none."""
        without = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return {
            **without,
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": "/nonexistent",
            **({"HF_TOKEN": token} if token else {}),
        }

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        """Return status and content of the answer to a request."""
        if path.startswith("/large/"):  # by the address alone, as at the real hub
            self.large[path.removeprefix("/large/")] = body
            return (400, {"error": "broken\n\x1b[2J"}) if self.broken else (200, {})
        if token not in (WRITES, READS):
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/repos/create":
            return self.create(json.loads(body), token)
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name = re.sub(r"^/(api/models/)?|(\.git)?/(auth-check|preupload|info|commit)/.*$", "", path)
        if name not in self.repositories:
            return 404, {"error": "Repository not found"}
        if path.endswith(("/auth-check/write", "/preupload/main", "/commit/main")) and token == READS:
            return 403, {"error": "Forbidden"}
        return 200, self.content(path, name, body)

    def create(self, asked: dict[str, Any], token: str) -> tuple[int, Any]:
        """Create a repository of the user or of nobody else."""
        name = f"{asked['organization'] or 'me'}/{asked['name']}"
        if token == READS or not name.startswith("me/"):
            return 403, {"error": "You don't have the rights to create a model under this namespace"}
        status = 409 if name in self.repositories else 200
        private = asked.get("visibility") == "private" or asked.get("private", False)
        self.repositories.setdefault(name, {"private": private, "files": {}, "commits": []})
        return status, {"url": f"{self.url}/{name}", "name": name, "id": "1"}

    def content(self, path: str, name: str, body: bytes) -> Any:
        """Return the answer to a request about a repository."""
        repository = self.repositories[name]
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            modes = [
                (file["path"], "lfs" if file["path"].endswith((".safetensors", ".gguf")) else "regular")
                for file in files
            ]
            return {"files": [{"path": file, "uploadMode": mode, "shouldIgnore": False} for file, mode in modes]}
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [{"upload": {"href": f"{self.url}/large/{file['oid']}"}} for file in objects]
            return {"objects": [{**file, "actions": action} for file, action in zip(objects, upload, strict=True)]}
        if path.endswith("/commit/main"):
            self.commit(repository, [json.loads(line) for line in body.splitlines() if line])
            return {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True}
        return {"id": name, "private": repository["private"], "sha": "1" * 40, "siblings": []}

    def commit(self, repository: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Add the files of a commit to a repository; large ones have to be there, with the named digest."""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository["commits"].append(value["summary"])
            elif line["key"] == "file":
                repository["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                content = self.large[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                repository["files"][value["path"]] = content
