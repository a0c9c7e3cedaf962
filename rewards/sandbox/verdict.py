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
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

import psutil

from rewards.isolation.process import end_group, has_ended
from rewards.isolation.system import file_without_name, processors
from rewards.sandbox import bubblewrap

LONGEST_VERDICT = 10_000
"""Largest verdict that is read, bytes."""
START_LIMIT = 30
"""Limit on the start of both processes, before the time of the program begins, seconds."""
MOST_THREADS, MOST_FILES = 256, 4096
"""Limits on the threads and the files of a program, which take memory of the system that no other limit counts."""
INTERVAL = 0.05
"""Seconds between two looks at these."""


class Busy(Exception):
    """The machine, and not the program, is the reason that there is no verdict."""


def in_parallel(score: Callable[[int], float | Exception], rows: int) -> list[float | Exception]:
    """Return the scores of rows, computed on all processors; a row that found the machine busy is scored again."""
    with ThreadPoolExecutor(processors()) as pool:
        scores = list(pool.map(score, range(rows)))
    for row in [row for row, first in enumerate(scores) if isinstance(first, Busy)]:
        scores[row] = score(row)  # alone
        if isinstance(scores[row], Busy):  # the others would be busy, too, and the reward's time would run out
            break
    return scores


def verdict(
    program: str, tests: str, entry_point: str | None, seconds: float, memory_mb: int, boxed: bool
) -> float | Exception:
    """Return 1.0 if a program passes its tests, else 0.0; or why these tests cannot be used, or `Busy`."""
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
        code = stack.enter_context(running(["answer.py", *limits], boxed, code_in, code_out))
        process = stack.enter_context(running(["tests.py", *limits, *lines], boxed, task, output, from_code, to_code))
        for end in (code_in, to_code, from_code, code_out):
            end.close()  # so that each process sees when the other one has gone
        ended = within_limits(code, process, seconds + START_LIMIT)
        output.seek(0)
        last = output.read(LONGEST_VERDICT).decode(errors="replace").strip().rpartition("\n")[2]
        first_word, _, result = last.partition(" ")
        if not ended or first_word != word:
            return Busy("the machine was too busy to start a sandbox, or has no processes or memory left for it")
        if result.startswith("late") and was_starved(code, result, seconds):
            return Busy(f"in {seconds:g} s the machine gave the program less than half of a processor's time")
    if result in ("passed", "failed", "began") or result.startswith("late"):
        return float(result == "passed")
    return ValueError(result)


def within_limits(code: subprocess.Popen[bytes], tests: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether the tests end within some seconds; end the code, and so the tests, at its limits."""
    until = time.monotonic() + seconds
    while not has_ended(tests, INTERVAL):
        if time.monotonic() > until:
            return False
        with contextlib.suppress(psutil.Error, OSError):  # it has ended by now, or has no files of its own
            program = program_of(code)
            files = os.statvfs(f"/proc/{program.pid}/root/tmp") if program.pid != code.pid else None
            if program.num_threads() > MOST_THREADS or (files and files.f_files - files.f_ffree > MOST_FILES):
                program.kill()
    return True


def was_starved(code: subprocess.Popen[bytes], late: str, seconds: float) -> bool:
    """Return whether a program whose time is up got little of a processor, although it neither slept nor stopped."""
    used, awaited = map(float, late.split()[1:])
    try:
        program = program_of(code)
        used += sum(program.cpu_times()[:2])
        states = {psutil.Process(thread.id).status() for thread in program.threads()}
    except psutil.Error:
        return False
    rests = awaited and states <= {psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED}
    return used < seconds / 2 and not rests


def program_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the process of a program: within a sandbox, the last of bubblewrap's."""
    bubblewrap_or_program = psutil.Process(process.pid)
    return [bubblewrap_or_program, *bubblewrap_or_program.children(recursive=True)][-1]


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
