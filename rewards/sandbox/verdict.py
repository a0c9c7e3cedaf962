"""Whether a program passes its tests, each in a process of its own.

The tests call the program and get plain values back. Their process writes the verdict, with a secret word, to a file
that the program's process does not have.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from rewards.isolation.process import end_group, has_ended
from rewards.isolation.system import file_without_name
from rewards.sandbox import bubblewrap

LONGEST_VERDICT = 10_000
"""Largest verdict that is read, bytes."""
START_LIMIT = 30
"""Limit on the start of both processes, before the time of the program begins, seconds."""


def verdict(
    program: str, tests: str, entry_point: str | None, seconds: float, memory_mb: int, boxed: bool
) -> float | Exception:
    """Return 1.0 if a program passes its tests, else 0.0; or why these tests cannot be used."""
    word = secrets.token_hex(16)
    start = {"program": program, "tests": tests, "entry_point": entry_point, "seconds": seconds, "word": word}
    limits = [str(memory_mb), str(int(seconds) + 1)]
    with contextlib.ExitStack() as stack:
        task = stack.enter_context(os.fdopen(file_without_name("task"), "w+b"))
        task.write(json.dumps(start).encode())
        task.seek(0)
        output = stack.enter_context(tempfile.TemporaryFile())
        code_in, to_code, from_code, code_out = (stack.enter_context(end) for end in (*pipe(), *pipe()))
        lines = [str(from_code.fileno()), str(to_code.fileno())]
        stack.enter_context(running(["answer.py", *limits], boxed, code_in, code_out))
        process = stack.enter_context(running(["tests.py", *limits, *lines], boxed, task, output, from_code, to_code))
        for end in (code_in, to_code, from_code, code_out):
            end.close()  # so that each process sees when the other one has gone
        has_ended(process, seconds + START_LIMIT)
        output.seek(0)
        last = output.read(LONGEST_VERDICT).decode(errors="replace").strip().rpartition("\n")[2]
    given, _, result = last.partition(" ")
    if given == word and result not in ("passed", "failed"):
        return ValueError(result)
    return float((given, result) == (word, "passed"))


def pipe() -> tuple[BinaryIO, BinaryIO]:
    """Return the reading end and the writing end of a pipe."""
    reading, writing = os.pipe()
    return open(reading, "rb"), open(writing, "wb")


@contextlib.contextmanager
def running(
    program: list[str], boxed: bool, stdin: BinaryIO, stdout: BinaryIO, *inherited: BinaryIO
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program of `rewards.sandbox` in a sandbox or, unless `boxed`, in an empty folder; afterwards kill it."""
    line = [sys.executable, *bubblewrap.ISOLATED, str(bubblewrap.HERE / program[0]), *program[1:]]
    fds = [end.fileno() for end in inherited]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        errors = stack.enter_context(tempfile.TemporaryFile())  # a device could be changed by whoever has it open
        if boxed:
            line, descriptor = stack.enter_context(bubblewrap.sandboxed(*program))
            fds.append(descriptor)
        env = {"PATH": os.defpath}
        process = subprocess.Popen(
            line, stdin=stdin, stdout=stdout, stderr=errors, cwd=folder, env=env, pass_fds=fds, start_new_session=True
        )
        stack.callback(end_group, process)
        yield process
