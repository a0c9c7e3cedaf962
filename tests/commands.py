"""Commands as a user types them, each in a process of its own that is forked from one with the libraries loaded.

Importing them takes longer than most commands. Nothing of ours is loaded before the fork, so that a command reads its
environment as `python -m` would.
"""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.preloaded"])


class Command:
    """A running `python -m MODULE ARGUMENTS`; `output` and `errors` are files with its stdout and stderr."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        answers: str = "",
    ) -> None:
        self.line = [module, *map(str, arguments)]
        kept = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"}
        self.folder = tempfile.TemporaryDirectory()
        self.answers, self.output, self.errors = (Path(self.folder.name) / name for name in ("in", "out", "err"))
        self.answers.write_text(answers)
        files = (self.answers, self.output, self.errors)
        self.process = FORKS.Process(target=run, args=(self.line, str(cwd), {**kept, **(environment or {})}, files))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        self.process.join(timeout)
        if not self.ended():
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"{self.line} took more than {timeout} s: {self.errors.read_text()}")
        assert self.process.exitcode is not None
        texts = (self.output.read_text(errors="replace"), self.errors.read_text(errors="replace"))
        self.folder.cleanup()
        return subprocess.CompletedProcess(self.line, self.process.exitcode, *texts)


def command(module: str, *arguments: object, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `options` are those of `Command`."""
    return Command(module, *arguments, cwd=cwd, **options).wait()  # type: ignore[arg-type]


def sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a sweep into a folder; its process and those of its jobs are as a user starts them."""
    line = [sys.executable, "-m", "grpo.train", "-m", f"hydra.sweep.dir={folder}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return `summary.json` of the jobs of a sweep, by their directories."""
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob("*/summary.json"))}


def run(line: list[str], cwd: str, environment: dict[str, str], files: tuple[Path, Path, Path]) -> None:
    """Become a command, in a process that has just been forked."""
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv = list(line)
    runpy.run_module(line[0], run_name="__main__", alter_sys=True)
