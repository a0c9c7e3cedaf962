"""The list of commands, and a command by its short name."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from grpo import __main__ as commands


def listed(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo", *words], cwd=cwd, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_without_a_command_each_is_listed_with_a_line(words: tuple[str, ...], tmp_path: Path) -> None:
    done = listed(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert lines.keys() == commands.COMMANDS.keys()
    assert lines["train"] == "Train a policy with GRPO"
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_every_command_is_a_module() -> None:
    assert all(find_spec(module) for module in commands.COMMANDS.values())


def test_the_list_loads_no_library() -> None:
    code = (
        "import sys, grpo.__main__\nsys.argv[1:] = []\ngrpo.__main__.main()\n"
        "sys.exit(bool({'hydra', 'omegaconf', 'torch', 'rich', 'yaml'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("word", "hint"),
    [("tarin", "did you mean train?"), ("x\x1b[31m", "possible: init, train, plan"), ("+gpu=any", "possible")],
)
def test_a_wrong_command_is_one_line_with_the_likely_one(word: str, hint: str, tmp_path: Path) -> None:
    done = listed(word, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"grpo: {word!r}: no such command; ")
    assert hint in line


def test_a_command_becomes_its_module_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = []
    monkeypatch.setattr(os, "execv", lambda program, line: lines.append([program, *line[1:]]))
    monkeypatch.setattr(sys, "argv", ["grpo", "check", "correctness", "find=[hash]"])
    commands.main()
    assert lines == [[sys.executable, "-m", "rewards.check", "correctness", "find=[hash]"]]
