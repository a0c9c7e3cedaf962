"""A terminal that goes away, and signals that are ignored."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.utils.terminal import Lasting, on_signals


def broken(kind: str) -> int:
    """Return a descriptor to which nothing can be written."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = pty.openpty() if kind == "terminal" else os.pipe()
    if kind == "nobody reads":
        os.set_blocking(writer, False)
        while True:
            try:
                os.write(writer, bytes(4096))
            except BlockingIOError:
                return writer
    os.close(reader)
    if kind == "closed":
        os.close(writer)
    return writer


@pytest.mark.parametrize("kind", ["pipe", "terminal", "full disk", "nobody reads", "closed"])
def test_writing_to_a_terminal_that_is_gone_never_raises(kind: str) -> None:
    stream = Lasting(os.dup(2), "w")
    descriptor = broken(kind)
    if kind != "closed":
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    else:
        os.close(stream.fileno())
    assert stream.write(b"step 1/2") == 8
    if kind == "closed":
        os.open(os.devnull, os.O_WRONLY)  # so that closing the stream closes it


def test_a_closed_stderr_gets_no_file_and_a_command_ends(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    script = f"from grpo.utils.terminal import keep; keep(1, 2); file = open({str(file)!r}, 'w'); import os, sys; "
    script += "print('line', file=sys.stderr); os.write(2, b'of a library'); print('é' * 9999); file.write('row')"
    line, reader = [sys.executable, "-c", script], subprocess.PIPE
    process = subprocess.Popen(line, stdout=reader, preexec_fn=lambda: os.close(2), env=os.environ | {"LC_ALL": "C"})
    assert process.stdout
    process.stdout.close()
    assert process.wait(60) == 0
    assert file.read_text() == "row"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_an_ignored_signal_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        replaced = on_signals((signal.SIGHUP, signal.SIGTERM, signal.SIGINT), signal.default_int_handler)
        os.kill(os.getpid(), number)
        assert number not in replaced
        assert len(replaced) == 2
        for other, handler in replaced.items():
            signal.signal(other, handler)
    finally:
        signal.signal(number, before)
