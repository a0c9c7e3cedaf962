"""1 for a completion whose Python code passes the row's tests, 0 for any other.

Each completion runs in a process of its own with limits on time and memory, in an empty folder, without network and
without other programs. That stops accidents and common tricks, not an attacker: the code can read every file that you
can, an object can claim to equal everything, and an interpreter is no security boundary. Run the trainer in a container
without secrets if you do not trust the policy's code.
"""

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rewards.text import text_of

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
SANDBOX = Path(__file__).with_name("sandbox.py")


def code(
    completions: Sequence[Any], tests: Sequence[Any], seconds: float = 5.0, memory_mb: int = 512, **columns: Any
) -> list[float]:
    """Run the last fenced block of each completion, or all of it without one, and then its tests.

    Args:
        tests: Python statements of each row, or lists of them, that raise an exception if the code is incorrect.
        seconds: limit on the wall time of a completion with its tests, seconds.
        memory_mb: limit on its address space, MiB.
    """
    programs = [(FENCED.findall(text_of(c)) or [text_of(c)])[-1] for c in completions]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda one: passes(one[0], one[1], seconds, memory_mb), zip(programs, tests, strict=True)))


def passes(program: str, tests: Any, seconds: float, memory_mb: int) -> float:
    """Return 1.0 if the program passes the tests, else 0.0."""
    word = secrets.token_hex(16)
    start = json.dumps({"program": program, "memory_mb": memory_mb, "seconds": seconds})
    rest = json.dumps({"tests": tests if isinstance(tests, str) else "\n".join(tests), "word": word})
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+b") as output:
        command = [sys.executable, "-I", "-S", str(SANDBOX)]
        lines = f"{start}\n{rest}\n".encode()
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, input=lines, stdout=output, stderr=output, cwd=folder, env={}, timeout=seconds)
        output.seek(0)
        return float(output.read().strip().endswith(word.encode()))
