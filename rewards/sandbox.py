"""Runs a completion and then its tests under limits, in a process of its own that `rewards.code` starts.

Reads two lines of JSON from standard input, the completion and then the tests with a secret word, and writes the word
if all tests passed. The completion runs before the second line is read, so that it gains nothing by an early exit.
"""

import io
import json
import resource
import sys

FORBIDDEN = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "ctypes.",
)


def forbid(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse network, other programs and foreign functions; Python code cannot remove this hook."""
    if event.startswith(FORBIDDEN):
        raise PermissionError(f"{event} is not allowed here")


def main() -> None:
    """Run the completion and the tests from standard input."""
    lines, sys.stdin = sys.stdin, io.StringIO()
    sys.__stdin__ = None  # type: ignore[misc]
    start = json.loads(lines.readline())
    memory, seconds = start["memory_mb"] * 2**20, int(start["seconds"]) + 1
    for limit, value in {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: 2**20,
        resource.RLIMIT_CORE: 0,
    }.items():
        resource.setrlimit(limit, (value, value))
    sys.addaudithook(forbid)
    names = {"__name__": "completion"}
    exec(compile(start["program"], "completion", "exec"), names)
    rest = json.loads(lines.readline())
    exec(compile(rest["tests"], "tests", "exec"), names)
    print(rest["word"], flush=True)


if __name__ == "__main__":
    main()
