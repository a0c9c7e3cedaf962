"""The server of `python -m grpo.report --watch`: which requests it answers, and with what."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo import report
from grpo.extras.page import watch
from grpo.extras.page.watch import Server
from grpo.reporting.page import write_report
from grpo.rundir.sweep_dir import SWEEP
from tests.page_fixtures import write_run

Answer = tuple[int, http.client.HTTPMessage, str]


@pytest.fixture(scope="module")
def sweep(composed: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two jobs, whose second has a name that a browser quotes."""
    folder = tmp_path_factory.mktemp("watched") / "sweep"
    for name in ("0", "seed=1 ü"):
        write_run(folder / name, steps=3, groups=1, generations=2, typed=(f"train.seed={len(name)}",))
    (folder / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None}))
    (folder.parent / "secret.html").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def server(sweep: Path) -> Iterator[Server]:
    with Server(sweep, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: Server, path: str, method: str = "GET", hosts: tuple[str, ...] = ("localhost:8000",)) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("/", "<title>GRPO sweep "),
        ("/report.html", "<title>GRPO sweep "),
        ("/0/report.html", "<title>GRPO run sweep/0<"),
        ("/seed%3D1%20%C3%BC/report.html", "<title>GRPO run sweep/seed=1 ü<"),
    ],
)
def test_the_pages_of_a_sweep_and_its_jobs_are_served(server: Server, path: str, title: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 200
    assert title in body
    assert body.endswith("</html>")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert int(headers["Content-Length"]) == len(body.encode())


def test_head_is_answered_without_a_body(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=30) as connection:
        connection.sendall(b"HEAD / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.0 200 OK\r\n")
    assert re.search(r"Content-Length: \d{6,}\r\n", answer)
    assert answer.endswith("\r\n\r\n")


@pytest.mark.parametrize(
    "path",
    [
        "/0",
        "/0/",
        "/0/summary.json",
        "/report.json",
        "/sweep.json",
        "/0/report.html/",
        "/?x",
        "/../secret.html",
        "/0/../report.html",
        "/%2e%2e/secret.html",
        "/..%2fsecret.html",
        "/0/..%2F..%2F..%2Fsecret.html",
        "/%00",
        "/\\..\\secret.html",
        "http://localhost/secret.html",
        "*",
    ],
)
def test_nothing_but_the_pages_is_served(server: Server, path: str) -> None:
    status, _, body = ask(server, path)
    assert (status, body) == (404, "Not Found\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FETCH"])
def test_methods_that_change_something_are_refused(server: Server, method: str) -> None:
    status, headers, _ = ask(server, "/", method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000"])
def test_a_browser_on_this_machine_is_answered(server: Server, host: str) -> None:
    assert ask(server, "/", "HEAD", (host,))[0] == 200


@pytest.mark.parametrize(
    "hosts",
    [
        ("evil.example",),
        ("localhost.evil.example",),
        ("evil.example:8000",),
        ("127.0.0.1.evil.example",),
        ("localhost@evil.example",),
        ("192.168.0.1",),
        ("localhost:8000:80",),
        ("",),
        (),
        ("localhost", "evil.example"),
    ],
)
def test_the_name_of_another_site_is_refused(server: Server, hosts: tuple[str, ...]) -> None:
    status, _, body = ask(server, "/", hosts=hosts)
    assert status == 403
    assert "GRPO" not in body


@pytest.mark.parametrize(("path", "method"), [("/", "GET"), ("/nowhere", "GET"), ("/", "POST")])
def test_every_answer_has_the_security_headers(server: Server, path: str, method: str) -> None:
    _, headers, _ = ask(server, path, method)
    for name, value in watch.HEADERS.items():
        assert headers.get_all(name) == [value]
    assert headers["Server"].strip() == "grpo"


def test_only_this_machine_can_connect(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_nothing_is_written_into_the_sweep(server: Server, sweep: Path) -> None:
    for path in ("/", "/0/report.html"):
        assert ask(server, path)[0] == 200
    assert not list(sweep.rglob("report.*"))


def test_a_page_is_made_again_only_after_a_change(composed: Callable, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=3, groups=1, generations=2)
    before = watch.page_of(run_dir, watch.state_of(run_dir))
    assert watch.page_of(run_dir, watch.state_of(run_dir)) is before
    (run_dir / "summary.json").write_text(json.dumps({"status": "running", "reason": None}))
    after = watch.page_of(run_dir, watch.state_of(run_dir))
    assert b"data-written=" in after
    assert b"data-written=" not in before


def test_the_page_of_a_sweep_reloads_until_its_last_one(composed: Callable, tmp_path: Path) -> None:
    write_run(tmp_path / "0", steps=3, groups=1, generations=2)
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None}))
    summary = tmp_path / "0" / "summary.json"

    def reloads() -> bool:
        return b"data-written=" in watch.page_of(tmp_path, watch.state_of(tmp_path))

    assert reloads(), "between two jobs"
    write_report(tmp_path)
    os.utime(summary, ns=(0, 0))
    assert not reloads()
    completed = summary.read_text()
    summary.write_text(json.dumps({"status": "running", "reason": None}))
    os.utime(summary, ns=(0, 0))
    assert reloads(), "a page has been made by hand while a job runs"
    summary.write_text(completed)
    os.utime(tmp_path / "report.html", ns=(1, 1))
    assert reloads(), "it has been resumed"


def test_a_browser_asks_again_where_no_page_can_be_made(
    composed: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", steps=3, groups=1, generations=2)
    for file in (run_dir / ".hydra" / "config.yaml", run_dir / "resolved_config.yaml"):
        file.write_text("{\n[")
    with Server(run_dir, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, headers, body = ask(server, "/")
        server.shutdown()
    assert (status, headers["Refresh"], body) == (503, "10", "the page cannot be made at the moment\n")
    assert "\nno page of '/' could be made: " in capsys.readouterr().err


def test_a_closed_connection_is_no_traceback(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    for request in (b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", b"GET"):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset at the end
            connection.sendall(request)
    assert ask(server, "/")[0] == 200
    assert capfd.readouterr().err == ""


def left(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["report", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        report.main()
    return exit_.value.code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--watch", "{empty}"), "grpo.report: {empty}: neither a run nor a sweep is in it; name a directory such as "),
        (("--watch", "{empty}/no"), "grpo.report: {empty}/no: there is no such directory; "),
        (("--watch", "{sweep}", "--port=65536"), "grpo.report: --port=65536: a number up to 65535, 0 for any free"),
        (("--watch", "{sweep}", "{sweep}"), "grpo.report: --watch: name one directory, without --text"),
        (("--watch", "--text", "{sweep}"), "grpo.report: --watch: name one directory, without --text"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    sweep: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"empty": tmp_path, "sweep": sweep}
    assert left(monkeypatch, *(text.format(**places) for text in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message.format(**places))


def test_latest_is_the_sweep_for_a_page_and_its_job_as_text(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "multirun" / "day").mkdir(parents=True)
    shutil.copytree(sweep, tmp_path / "multirun" / "day" / "time")
    monkeypatch.chdir(tmp_path)
    jobs = {file.parents[1] for file in Path().glob("multirun/day/time/*/.hydra/config.yaml")}
    assert report.folder_of("latest", text=False) == Path("multirun/day/time")
    assert report.folder_of("latest", text=True) in jobs
    assert report.folder_of(str(sweep), text=True) == sweep


def test_a_port_in_use_is_one_line(
    server: Server, sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(watch, "give_way", lambda: None)
    assert left(monkeypatch, "--watch", sweep, "--port", server.server_port) == 2
    line = f"grpo.report: --port={server.server_port}: Address already in use; choose another, 0 for any free port\n"
    assert capsys.readouterr().err == line


def test_ctrl_c_ends_it_without_a_word(sweep: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, and inherited
    line = [sys.executable, "-m", "grpo.report", "--watch", str(sweep), "--port=0"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert " at http://127.0.0.1:" in said
    assert "ssh -L " in said
    assert (process.returncode, errors) == (0, "")
