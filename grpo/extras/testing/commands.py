"""Commands as a user types them, each in a process of its own that is forked from one with the libraries loaded.

Importing them takes longer than most commands. Of ours only the package `grpo` itself is loaded before the fork, and no
command or module of it, so that a command reads its environment as `python -m` would. The processes that a forked
command starts, those of a launcher or the jobs of a sweep, are forked in the same way.
"""

import atexit
import ctypes
import inspect
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import Any

from grpo.utils.patching import replaced

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["grpo.extras.testing.preloaded"])
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
REGISTER = "FORKED_PROCESSES"
"""Environment variable: a folder with a file per forked process, as they all look alike from outside."""
os.environ.setdefault(REGISTER, tempfile.mkdtemp())
MACHINE = "NETWORK_NAMESPACE"
"""Environment variable: the network namespace that a forked process enters, as `ip netns exec` does."""
COMMANDS: tuple[str, ...] = (
    "grpo.train",
    "grpo.plan",
    "grpo.preflight",
    "grpo.evaluate",
    "grpo.report",
    "grpo.export",
    "grpo.chat",
    "grpo.measure",
    "grpo.replay",
    "grpo.why",
    "grpo.doctor",
    "grpo.tools.check",
)
COMMANDS += ("rewards.check", "benchmarks.", "torch.distributed.run", "accelerate.commands.launch")
"""Modules that are forked, or how they begin; workers of rewards and tools load no library and start as quickly."""


class Forked(subprocess.Popen):
    """`subprocess.Popen`, which forks where a line is `python -m grpo.NAME …` or `python FILE.py …`."""

    fork: Any = None

    def _execute_child(self, *words: Any) -> None:
        arguments = inspect.signature(super()._execute_child).bind(*words).arguments  # type: ignore[misc]
        if (line := runs(arguments["args"])) is None:
            return super()._execute_child(*words)  # type: ignore[misc]
        streams = [arguments[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [Stream(number if stream == -1 else stream) for number, stream in enumerate(streams)]
        environment = dict(os.environ if arguments["env"] is None else arguments["env"])
        folder = os.fspath(arguments["cwd"] or Path.cwd())
        with replaced_main():
            forkserver._forkserver.ensure_running()
            key = getattr(forkserver._forkserver, "_forkserver_authkey", None)  # since Python 3.14
            how = (line, folder, environment, streams, arguments["start_new_session"], key)
            self.fork = FORKS.Process(target=become, args=how)
            self.fork.start()
        self.pid, self._child_created = self.fork.pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(arguments[name] for name in ends))  # type: ignore[attr-defined]

    def _internal_poll(self, *words: Any, **options: Any) -> int | None:
        if self.fork is None:
            return super()._internal_poll(*words, **options)  # type: ignore[misc]
        if self.returncode is None:
            self.returncode = self.fork.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.fork is None:
            return super()._wait(timeout)  # type: ignore[misc]
        self.fork.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


class Stream:
    """A file descriptor that is sent to a process with its arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return received, (reduction.DupFd(self.number),)


def received(sent: Any) -> Stream:
    """A stream in the process that it was sent to."""
    return Stream(sent.detach())


@contextmanager
def replaced_main() -> Iterator[None]:
    """While inside, `__main__` is empty: multiprocessing would import it in the new process."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def runs(line: Any) -> list[str] | None:
    """Return the module or file that a command line runs, with its arguments, if it can be forked."""
    if not isinstance(line, list | tuple) or str(line[0]) != sys.executable:
        return None
    words = [str(word) for word in line[1:]]
    if words and words[0] == "-u":
        words = words[1:]
    if words[:1] == ["-m"]:
        words = words[1:]
        return words if words[0].startswith(COMMANDS) else None
    return words if words and words[0].endswith(".py") else None


def become(
    line: list[str],
    folder: str,
    environment: dict[str, str],
    streams: Sequence[Stream],
    session: bool,
    key: bytes | None,
) -> None:
    """Become a command, in a process that has just been forked; `key` is the one that the server asks for."""
    if session:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.number, number)
        if stream.number > 2:
            os.close(stream.number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    if MACHINE in environment:
        enter(environment[MACHINE])
    note = {"line": line, "rank": environment.get("RANK")}
    (Path(environment[REGISTER]) / str(os.getpid())).write_text(json.dumps(note))
    os.chdir(folder)
    sys.argv = list(line)
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]  # it is: we come from it
    forkserver._forkserver._forkserver_authkey = key  # type: ignore[attr-defined]
    try:
        with replaced(subprocess, "Popen", Forked):
            if line[0].endswith(".py"):
                sys.path.insert(0, str(Path(line[0]).parent))
                runpy.run_path(line[0], run_name="__main__")
            else:
                sys.path.insert(0, folder)
                runpy.run_module(line[0], run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def finished(line: Sequence[str], timeout: float = 300, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line to its end, forked where it can be; `options` are those of `subprocess.Popen`."""
    with Forked(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        output, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(line, process.returncode, output, errors)


def forked() -> dict[int, dict[str, Any]]:
    """The line and the rank of each process that was forked, by its number; most have ended."""
    return {int(file.name): json.loads(file.read_text()) for file in Path(os.environ[REGISTER]).iterdir()}


def enter(namespace: str) -> None:
    """Enter a network namespace, with its own file about names."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        entered = libc.setns(file.fileno(), CLONE_NEWNET) == 0 and libc.unshare(CLONE_NEWNS) == 0
    assert entered, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    subprocess.run(["mount", "--bind", f"/etc/netns/{namespace}/resolv.conf", "/etc/resolv.conf"], check=True)


class Command:
    """A running `python -m MODULE ARGUMENTS`."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        answers: str = "",
    ) -> None:
        self.line = [sys.executable, "-m", module, *map(str, arguments)]
        inherited = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
        self.folder = tempfile.TemporaryDirectory()
        self.answers, self.output, self.errors = (Path(self.folder.name) / name for name in ("in", "out", "err"))
        self.answers.write_text(answers)
        with self.answers.open() as standard_input, self.output.open("a") as output, self.errors.open("a") as errors:
            environment = {**inherited, **(environment or {})}
            self.process = Forked(
                self.line, cwd=cwd, env=environment, stdin=standard_input, stdout=output, stderr=errors
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            raise TimeoutError(f"{self.line} took more than {timeout} s: {self.errors.read_text()}") from error
        texts = (self.output.read_text(errors="replace"), self.errors.read_text(errors="replace"))
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.line, status, *texts)


def command(module: str, *arguments: object, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `options` are those of `Command`."""
    return Command(module, *arguments, cwd=cwd, **options).wait()  # type: ignore[arg-type]


def sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a sweep into a folder."""
    return command("grpo.train", "-m", f"hydra.sweep.dir={folder}", *arguments, cwd=Path.cwd())


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return `summary.json` of the jobs of a sweep, by their directories."""
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob("*/summary.json"))}


def one_after_the_other() -> None:
    """Run the commands that are this process's arguments, each a list in JSON, until one fails."""
    for line in map(json.loads, sys.argv[1:]):
        done = command(*line, cwd=Path.cwd())
        if done.returncode:
            sys.exit(f"{line}: status {done.returncode}\n{done.stderr}")
