"""The page of a run, or of a sweep and its jobs, served on the loopback interface: for a browser behind `ssh -L`.

It is made in memory when it is asked for, and nothing is written. Only GET and HEAD of these pages are answered, and
only to a browser that calls this machine localhost: the name of another site that leads here (DNS rebinding) is not.
"""

import contextlib
import functools
import re
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import unquote

from grpo.reporting.page import run_page
from grpo.reporting.render import PAGE
from grpo.reporting.sweep import sweep_page
from grpo.rundir.run_dir import read_run
from grpo.rundir.sweep_dir import SWEEP, Sweep, is_sweep, read_sweep
from grpo.utils.errors import ConfigError
from grpo.utils.priority import give_way
from grpo.utils.spoken import shown

LOOPBACK = "127.0.0.1"
HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
"""Host headers of requests that are answered; `ssh -L` may give the port another number."""
HEADERS = {
    "Allow": "GET, HEAD",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # beside the policy of the page itself
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""
STATE = ("metrics.jsonl", "summary.json", "evaluation.json", SWEEP, PAGE)
"""Files with which a page changes."""


class Server(ThreadingHTTPServer):
    """Listens for browsers on this machine.

    Args:
        folder: directory of a run or of a sweep.
        port: 0 for any free one.

    Raises:
        OSError: the port is in use.
    """

    allow_reuse_port = False  # two programs at one port would share its requests

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.making = folder, threading.Lock()
        super().__init__((LOOPBACK, port), Handler)

    def server_bind(self) -> None:
        """Take the port; `HTTPServer` would look for a name of this machine, too, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about a browser that has closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def page(self, address: str) -> bytes | None:
        """Return the page at an address; None if there is none."""
        folder = {"/": self.folder, f"/{PAGE}": self.folder, **links(self.folder)}.get(unquote(address))
        if folder is None:
            return None
        with self.making:
            return page_of(folder, state_of(folder))


class Handler(BaseHTTPRequestHandler):
    """Answers a request with a page, or with a line."""

    server: Server
    timeout = 10.0
    server_version, sys_version = "grpo", ""
    error_message_format, error_content_type = "%(message)s\n", "text/plain; charset=utf-8"

    def parse_request(self) -> bool:
        """Return whether to answer, after refusing other hosts and methods."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
            self.send_error(HTTPStatus.FORBIDDEN, "the address of this page begins with localhost or 127.0.0.1")
        elif self.command not in ("GET", "HEAD"):
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            return True
        return False

    def do_GET(self) -> None:
        """Answer with a page."""
        try:
            page = self.server.page(self.path)
        except Exception as error:  # a file that is being written, or a disk that has gone
            print(f"no page of {self.path!a} could be made: {' '.join(str(error).split())}", file=sys.stderr)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the page cannot be made at the moment")
            return
        if page is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)

    do_HEAD = do_GET

    def send_response(self, code: int, message: str | None = None) -> None:
        """Begin an answer; a browser asks again for a page that could not be made."""
        super().send_response(code, message)
        if code == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Refresh", "10")

    def end_headers(self) -> None:
        """End the headers with those of every answer."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Stay silent: a page reloads every half minute."""


def jobs(folder: Path) -> list[Path]:
    """Return the directories of the jobs of a sweep that have begun; of a run none."""
    return sorted(file.parents[1] for file in folder.glob("**/.hydra/config.yaml")) if is_sweep(folder) else []


def links(folder: Path) -> dict[str, Path]:
    """Return the directories of jobs by the addresses to which the page of their sweep leads."""
    return {f"/{job.relative_to(folder)}/{PAGE}": job for job in jobs(folder)}


def state_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of the files of a run, or of a sweep and its jobs, with which the page changes."""
    files = []
    for job in (folder, *jobs(folder)):
        for name in STATE:
            with contextlib.suppress(FileNotFoundError):
                status = (job / name).stat()
                files.append((str(job / name), status.st_mtime_ns, status.st_size))
    return tuple(files)


@functools.lru_cache(maxsize=8)
def page_of(folder: Path, state: tuple[tuple[str, int, int], ...]) -> bytes:
    """Return the page of a run or of a sweep, which is kept until its state changes.

    Raises:
        ConfigError: the directory holds neither.
    """
    if is_sweep(folder):
        sweep = read_sweep(folder)
        text = sweep_page(sweep, live=not is_over(folder, sweep))
    else:
        _, text = run_page(read_run(folder))
    return text.encode(errors="replace")


def is_over(folder: Path, sweep: Sweep) -> bool:
    """Return whether a sweep has ended: it writes its page after the last summary of a job."""
    page, summaries = folder / PAGE, [run.folder / "summary.json" for run in sweep.runs]
    if any(run.status == "running" for run in sweep.runs) or not page.exists():
        return False
    return page.stat().st_mtime_ns >= max(file.stat().st_mtime_ns for file in summaries)


def watch(folder: Path, port: int) -> None:
    """Serve the page of a run or of a sweep until Ctrl-C.

    Raises:
        ConfigError: the directory holds neither, or the port cannot be had.
    """
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port={port}: a number up to 65535, 0 for any free port")
    with contextlib.suppress(KeyboardInterrupt):
        page_of(folder, state_of(folder))
        give_way()
        try:
            server = Server(folder, port)
        except OSError as error:
            raise ConfigError(f"--port={port}: {error.strerror}; choose another, 0 for any free port") from error
        with server:
            port = server.server_port
            name = f"{shown(folder)} at http://{LOOPBACK}:{port}/"
            print(f"{name}; from elsewhere `ssh -L {port}:{LOOPBACK}:{port} HOST`; Ctrl-C ends it", flush=True)
            server.serve_forever()
