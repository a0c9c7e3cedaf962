"""The common part of `python -m rewards.check` and `python -m grpo.tools.check`: options, rows, tables, exit status."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Column, Table

from rewards.text import printable


class Parser(argparse.ArgumentParser):
    """Reads words behind a command; wrong ones end with a one-line error, without the usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog.removeprefix('python -m ')}: {message}", file=sys.stderr)
        sys.exit(2)


def seconds(text: str) -> float:
    """Read a positive number of seconds; ValueError for another text."""
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def count(text: str) -> int:
    """Read a positive whole number; ValueError for another text."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def options(command: str, description: str, fn: str, data: str, timeout: float) -> Parser:
    """Return a parser with the options of every check; `fn`, `data` and the default of `timeout` (seconds) differ."""
    parser = Parser(prog=f"python -m {command}", description=description.splitlines()[0])
    parser.add_argument("fn", help=fn)
    parser.add_argument("--data", type=Path, help=f"JSONL with {data}")
    parser.add_argument("--rows", type=count, default=50, help="rows of the data to try; default: 50")
    parser.add_argument(
        "--timeout", type=seconds, default=timeout, help=f"limit of a call, seconds; default: {timeout:g}"
    )
    return parser


def read_rows(file: Path, most: int) -> list[dict[str, Any]]:
    """Return the first `most` rows of a JSONL file.

    Raises:
        ValueError: there is no such file, it is empty, or a line is no JSON.
    """
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    rows = []
    with file.open() as lines:
        for number, line in islice(((number, line) for number, line in enumerate(lines, 1) if line.strip()), most):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                reason = str(error).partition(":")[0]
                raise ValueError(f"{file}, line {number}: {reason}: {line.strip()[:80]!r}") from error
    if not rows:
        raise ValueError(f"{file}: the file has no rows")
    return rows


def print_table(
    console: Console, texts: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], alarm: str = ""
) -> None:
    """Print a table with columns of texts, then columns of numbers; the column `alarm` is red."""
    right = [Column(name, justify="right", style="red" if name == alarm else "") for name in numbers]
    table = Table(*texts, *right)
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table, soft_wrap=False)


def run(command: str, check: Callable[[Console], list[str]], verdict: str) -> NoReturn:
    """Run a check, which returns a line per problem, and print the problems or the verdict.

    Exit with status 0, with 1 after problems, or with 2 for wrong input, if the check raises ValueError or OSError.
    """
    width = None if sys.stdout.isatty() else 120
    console = Console(width=width, highlight=False, markup=False, soft_wrap=True)  # what a model wrote stays as it is
    try:
        problems = check(console)
    except (ValueError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        sys.exit(2)
    for problem in problems:
        console.print(problem, style="red")
    if verdict and not problems:
        console.print(f"no issues found: {verdict}", style="green")
    sys.exit(bool(problems))
