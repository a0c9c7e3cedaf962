"""`python -m grpo.tools.check` on tools and environments that a run should not use, and on the built-in one."""

from pathlib import Path

import pytest

from grpo.extras.testing.commands import command

BAD = '''
import os, subprocess
from pathlib import Path

def calculate(expression: str) -> str:
    """Calculate.

    Args:
        expression: Any
    """
    return str(eval(expression, {}, {}))

def shell(name: str) -> str:
    """Look for a file.

    Args:
        name: Of the file
    """
    return subprocess.run(f"ls {name}", shell=True, capture_output=True, text=True).stdout

def read(path: str) -> str:
    """Read a file.

    Args:
        path: Of the file
    """
    return Path("/tmp", path).read_text()

class Leaves:
    def __init__(self):
        self.seen = []

    def reset(self, **columns) -> str:
        return f"seen {self.seen}"

    def look(self, at: int) -> str:
        """Look.

        Args:
            at: Any
        """
        self.seen.append(at)
        return "x" * 5000

    def get_reward(self) -> str:
        return "much"
'''


def test_the_built_in_calculator_stands_every_argument(tmp_path: Path) -> None:
    done = command("grpo.tools.check", "grpo.builtin.tasks.calculator.calculator", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"description": "Numbers, + - * / and parentheses, for example (412 + 367) * 4"' in done.stdout
    assert "no issues found: a run can use it" in done.stdout


@pytest.mark.parametrize(
    ("name", "problems"),
    [
        ("calculate", ["runs what it is given as code", "hostile ones: hangs"]),
        ("shell", ["runs what it is given as code, or by a shell"]),
        ("read", ["read with hostile ones: returns /etc/passwd"]),
        (
            "Leaves",
            ["returns up to 5,000 characters", "begins otherwise after an episode", "get_reward: returned 'much'"],
        ),
    ],
)
def test_what_a_run_should_not_use_is_found(name: str, problems: list[str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    done = command("grpo.tools.check", f"bad.py:{name}", "--timeout", "1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    for problem in problems:
        assert problem in done.stdout


def test_what_is_no_tool_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    for arguments, says in {
        ("none.py:Env",): "none.py:Env: there is no file",
        ("grpo.builtin.tasks.calculator.value_of",): "value_of",
        ("grpo.builtin.tasks.calculator.calculator", "--data", "rows.jsonl"): "rows.jsonl: the file has no rows",
        ("grpo.builtin.tasks.calculator.calculator", "--data", "none.jsonl"): "none.jsonl: there is no such file",
        ("grpo.builtin.tasks.calculator.calculator", "--arguments", "[1]"): "[1]: not a JSON object",
        ("grpo.builtin.tasks.calculator.calculator", "--timeout", "-1"): "invalid seconds value: '-1'",
        ("grpo.builtin.tasks.calculator.calculator", "--rows", "0"): "invalid count value: '0'",
    }.items():
        done = command("grpo.tools.check", *arguments, cwd=tmp_path)
        assert done.returncode == 2, done.stdout
        assert done.stderr.startswith("grpo.tools.check: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr
