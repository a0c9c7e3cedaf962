"""The unit test of a tool or an environment, before a run depends on it: `python -m grpo.tools.check my_env.py:Env`.

Prints each tool's description for the policy, calls it with valid, invalid and hostile arguments, plays random episodes
of an environment, and reports the problems. Exits with status 1 if a run should not use it. A tool that raises is no
problem: the policy reads the error. Examples: `grpo.tools.check my_env.py:Env --data rows.jsonl`,
`grpo.tools.check my_tools.py:calculator --arguments '{"expression": "1 + 2"}'`.
"""

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers.utils.chat_template_utils import get_json_schema

from grpo.tools.arguments import hostile, invalid, valid
from grpo.tools.isolation import FAILED, Source, ToolError, environment_of, tools_of
from rewards.text import printable

VALID = 10
"""Calls of each tool with arguments of the types that it asks for."""
EPISODES, TURNS = 10, 10
"""Random episodes, and calls in each."""
LONG = 4000
"""Characters of a result that crowds out the policy's own tokens."""
SECRET = "root:x:0"
"""In /etc/passwd, which no tool should show."""


@dataclass
class Tried:
    """The calls of one tool with one kind of arguments."""

    results: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def try_out(tool: Callable[..., Any], arguments: Iterable[dict[str, Any]]) -> Tried:
    """Call a tool with each of some arguments."""
    tried = Tried()
    for given in arguments:
        start = time.monotonic()
        try:
            tried.results.append(str(tool(**given)))
        except ToolError as error:
            tried.errors.append(str(error))
        tried.seconds.append(time.monotonic() - start)
    return tried


def check_tool(
    tool: Callable[..., Any], schema: dict[str, Any], examples: list[dict[str, Any]], console: Console
) -> list[str]:
    """Print the schema of a tool and a table of its calls, and return the problems.

    Args:
        examples: arguments that it has to take; without any, random ones of its types.
    """
    name, rng = schema["function"]["name"], random.Random(0)
    console.print(json.dumps(schema["function"], indent=1), highlight=False, markup=False, soft_wrap=True)
    table, problems = Table(f"{name} with", "calls", "errors", "ms", "for example"), []
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        kinds = {
            "valid arguments": examples or [valid(schema, rng) for _ in range(VALID)],
            "invalid ones": invalid(schema, rng),
            "hostile ones": hostile(schema, rng, canary),
        }
        for kind, arguments in kinds.items():
            tried = try_out(tool, arguments)
            seen = (tried.results or tried.errors or ["none to try"])[0]
            took = f"{1000 * mean(tried.seconds):.1f}" if tried.seconds else ""
            table.add_row(kind, str(len(tried.seconds)), str(len(tried.errors)), took, repr(printable(seen)[:60]))
            problems += problems_of(f"{name} with {kind}", tried)
            if kind == "valid arguments" and not tried.results and not problems:
                advice = "" if examples else "; give it some with --arguments if it takes only special ones"
                problems.append(
                    f"{name}: fails with all {len(tried.errors)} arguments, {tried.errors[0]!r:.120}{advice}"
                )
            if canary.exists():
                problems.append(f"{name}: runs what it is given as code, or by a shell")
                canary.unlink()
    console.print(table)
    return problems


def problems_of(what: str, tried: Tried) -> list[str]:
    """Return what a run should not have: calls that hang or end the process, long results, and secrets."""
    problems = []
    for sign, problem in (("took longer", "hangs"), ("process ended", "ends its process")):
        if count := sum(sign in error for error in tried.errors):
            problems.append(f"{what}: {problem}, in {count} of {len(tried.seconds)} calls")
    if longest := max((len(result) for result in tried.results if len(result) > LONG), default=0):
        problems.append(f"{what}: returns up to {longest:,} characters, which count as completion tokens")
    if any(SECRET in result for result in tried.results):
        problems.append(f"{what}: returns /etc/passwd")
    return problems


def play(kind: type, rows: list[dict[str, Any]], console: Console) -> list[str]:
    """Play random episodes of an environment as TRL would, print what they took, and return the problems."""
    rng, environment = random.Random(0), kind()
    begin, steps = Tried(), Tried()
    rewards: list[Any] = []
    for row in islice(cycle(rows), EPISODES):
        begun = try_out(environment.reset, [row])
        begin.results += begun.results
        begin.seconds += begun.seconds
        names = [name for name in vars(kind) if not name.startswith("_") and name != "get_reward"]
        for name in rng.choices(names, k=TURNS):
            tool = getattr(environment, name)
            turn = try_out(tool, [valid(get_json_schema(tool), rng)])
            steps.results, steps.errors = steps.results + turn.results, steps.errors + turn.errors
            steps.seconds += turn.seconds
        if hasattr(kind, "get_reward"):
            rewards.append(environment.get_reward())
    problems = problems_of("a random episode", steps)
    problems += [one for one in begin.results if FAILED in one][:1]
    fresh = [kind().reset(**rows[0]) for _ in range(2)]
    if fresh[0] == fresh[1] != environment.reset(**rows[0]):
        problems.append("reset: begins otherwise after an episode than in a new environment, and TRL uses them again")
    table = Table(f"{EPISODES} random episodes", "calls", "errors", "ms")
    for name, tried in (("reset", begin), (f"{TURNS} turns each", steps)):
        took = f"{1000 * mean(tried.seconds):.1f}"
        table.add_row(name, str(len(tried.seconds)), str(len(tried.errors)), took)
    console.print(table)
    console.print(f"it begins with: {printable(str(fresh[0]))[:300]}", highlight=False, markup=False, soft_wrap=True)
    if odd := [one for one in rewards if not isinstance(one, int | float)]:
        problems.append(f"get_reward: returned {odd[0]!r:.60}")
    elif rewards:
        console.print(f"rewards from {min(rewards):g} to {max(rewards):g}", highlight=False)
    return problems


def read_rows(file: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, for `reset`; one without columns if there is no file."""
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()] if file else [{}]
    if not rows:
        raise ValueError(f"{file}: the file has no rows")
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m grpo.tools.check", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="path/to/file.py:name or package.module.name, of a function or an environment")
    parser.add_argument("--arguments", type=json.loads, action="append", default=[], help="JSON that it has to take")
    parser.add_argument("--data", type=Path, help="JSONL with rows of the data, for an environment's reset")
    parser.add_argument("--timeout", type=float, default=5.0, help="limit of a call, seconds; default: 5")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    logging.disable(logging.WARNING)  # errors are in the tables
    try:
        rows = read_rows(args.data)
        source = Source([args.name], None, args.timeout, sys.stderr)
    except (ValueError, OSError) as error:
        print(f"grpo.tools.check: {error}", file=sys.stderr)
        sys.exit(2)
    try:
        problems, kind = [], environment_of(source) if source.description["name"] else None
        if kind:
            environment = kind()
            if FAILED in str(begun := environment.reset(**rows[0])):
                print(f"grpo.tools.check: {begun}; rows for reset come with --data", file=sys.stderr)
                sys.exit(1)
            tools = [getattr(environment, name) for name in source.description["tools"]]
        else:
            tools = tools_of(source)
        for tool in tools:
            problems += check_tool(tool, get_json_schema(tool), args.arguments, console)
        if kind:
            problems += play(kind, rows, console)
    finally:
        source.close()
    for line in problems:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if not problems:
        console.print("[green]a run can use it[/]")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
