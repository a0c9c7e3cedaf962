"""The unit test of a tool or an environment, before a run depends on it: `python -m grpo.tools.check my_env.py:Env`.

Prints each tool's description for the policy, calls it with valid, invalid and hostile arguments, plays random episodes
of an environment, and reports the problems. Exits with status 1 if a run should not use it. A tool that raises is no
problem: the policy reads the error. Examples: `grpo.tools.check my_env.py:Env --data rows.jsonl`,
`grpo.tools.check my_tools.py:calculator --arguments '{"expression": "1 + 2"}'`.
"""

import json
import logging
import random
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from transformers.utils.chat_template_utils import get_json_schema

from grpo.extras.environments.taskset import COLUMN, MODULE, asked
from grpo.tools.arguments import hostile, invalid, valid
from grpo.tools.processes import Source, ToolError
from grpo.tools.running import FAILED, Environment, environment_of, tools_of
from grpo.utils.errors import ConfigError
from rewards.checking import options, print_table, read_rows, run
from rewards.isolation.reward import Reward
from rewards.text import printable

TASKSET = "verifiers:"
"""Beginning of the name of a taskset of verifiers."""
VALID = 10
"""Number of calls per tool with valid arguments."""
EPISODES, TURNS = 10, 10
"""Random episodes, and calls in each."""
LONG = 4000
"""Characters of a result that crowds out the policy's own tokens."""
SECRET = "root:x:0"
"""In /etc/passwd, which no tool should show."""


@dataclass
class Tried:
    """Calls of tools, and the problems among them."""

    results: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    images: int = 0
    """Results with an image."""

    def call(self, tool: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Call a tool."""
        start = time.monotonic()
        try:
            result = tool(**arguments)
            self.images += isinstance(result, list)
            parts = result if isinstance(result, list) else [{"text": str(result)}]
            self.results.append(" ".join(part.get("text", "[image]") for part in parts))
        except ToolError as error:
            self.errors.append(str(error))
        self.seconds.append(time.monotonic() - start)

    def problems(self, title: str) -> list[str]:
        """Return calls that hang or end the process, long results, and secrets."""
        problems = []
        for sign, problem in (("took longer", "hangs"), ("process ended", "ends its process")):
            if count := sum(sign in error for error in self.errors):
                problems.append(f"{title}: {problem} on {count} of {len(self.seconds)} calls")
        if longest := max((len(result) for result in self.results if len(result) > LONG), default=0):
            problems.append(f"{title}: returns up to {longest:,} characters, which count as completion tokens")
        if any(SECRET in result for result in self.results):
            problems.append(f"{title}: returns /etc/passwd")
        return problems


def show(title: str, calls: dict[str, Tried], console: Console) -> None:
    """Print a table of calls."""
    rows = []
    for name, tried in calls.items():
        example = (tried.results or tried.errors or ["none to try"])[0]
        took = f"{1000 * mean(tried.seconds):.1f}" if tried.seconds else ""
        rows.append([name, repr(example[:60]), str(len(tried.seconds)), str(len(tried.errors)), took])
    print_table(console, [title, "for example"], ["calls", "errors", "ms"], rows)
    if any(tried.images for tried in calls.values()):
        console.print("results have images, which only a policy like Qwen-VL reads: a run of another one ends")


def check_tool(
    tool: Callable[..., Any], schema: dict[str, Any], examples: list[dict[str, Any]], console: Console
) -> list[str]:
    """Print the schema of a tool and a table of its calls with examples or random arguments; return the problems."""
    name, rng = schema["function"]["name"], random.Random(0)
    console.print(json.dumps(schema["function"], indent=1))
    calls, problems = {}, []
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        kinds = {
            "valid arguments": examples or [valid(schema, rng) for _ in range(VALID)],
            "invalid ones": invalid(schema, rng),
            "hostile ones": hostile(schema, rng, canary),
        }
        for kind, arguments in kinds.items():
            tried = calls[kind] = Tried()
            for keywords in arguments:
                tried.call(tool, keywords)
            problems += tried.problems(f"{name} with {kind}")
            if kind == "valid arguments" and not tried.results and not problems:
                advice = "" if examples else "; give it some with --arguments if it takes only special ones"
                count = f"{len(tried.errors)} of {len(tried.errors)} calls"
                problems.append(f"{name}: fails on {count}, {tried.errors[0]!r:.120}{advice}")
            if canary.exists():
                problems.append(f"{name}: runs what it is given as code, or by a shell")
                canary.unlink()
    show(f"{name} with", calls, console)
    return problems


def play(
    kind: type[Environment], schemas: dict[str, dict[str, Any]], rows: list[dict[str, Any]], console: Console
) -> list[str]:
    """Play random episodes of an environment like TRL, print their times, and return the problems."""
    rng, environment = random.Random(0), kind()
    begun, turns = Tried(), Tried()
    rewards: list[Any] = []
    for row in islice(cycle(rows), EPISODES):
        begun.call(environment.reset, row)
        for name in rng.choices(list(schemas), k=TURNS):
            turns.call(getattr(environment, name), valid(schemas[name], rng))
        if hasattr(environment, "get_reward"):
            rewards.append(environment.get_reward())
    problems = turns.problems("a random episode") + [text for text in begun.results if FAILED in text][:1]
    fresh = [kind().reset(**rows[0]) for _ in range(2)]
    if fresh[0] == fresh[1] != environment.reset(**rows[0]):
        problems.append("reset: begins otherwise after an episode than in a new environment, and TRL uses them again")
    show(f"{EPISODES} random episodes", {"reset": begun, f"{TURNS} turns each": turns}, console)
    if odd := [reward for reward in rewards if not isinstance(reward, int | float)]:
        problems.append(f"get_reward: returned {odd[0]!r:.60}")
    elif rewards:
        console.print(f"rewards from {min(rewards):g} to {max(rewards):g}")
    return problems


def check(args: Namespace, console: Console) -> list[str]:
    """Print the behaviour of a tool, an environment or a taskset, and return the problems, a line per problem.

    Raises:
        ValueError: it cannot be loaded, or described to a model, or there is no data.
    """
    name, taskset, keywords = args.fn, args.fn.partition(TASKSET)[2], args.environment_args
    first: tuple[Any, ...] = (taskset or args.environment_id,) if taskset or args.environment_id else ()
    if taskset:
        try:
            description = asked(taskset, keywords, 0, args.rows)
        except ConfigError as error:
            raise ValueError(error) from error
        problems = check_rewards(taskset, keywords, description, args.timeout, console)
        if not description["tools"]:
            return problems
        name, rows = f"{MODULE}.environment", description["rows"]
    else:
        rows, problems = read_rows(args.data, args.rows) if args.data else [{}], []
    with closing(Source([name], True if taskset else None, args.timeout, sys.stderr, (first, keywords))) as source:
        return problems + check_source(source, rows, args.arguments, console)


def check_source(
    source: Source, rows: list[dict[str, Any]], examples: list[dict[str, Any]], console: Console
) -> list[str]:
    """Print the behaviour of each tool of a source, and of an environment's episodes; return the problems."""
    kind = environment_of(source) if source.description["name"] else None
    if kind:
        environment = kind()
        if FAILED in (begun := environment.reset(**rows[0]) or ""):
            return [f"{begun.strip()}; rows for reset come with --data"]
        if begun:
            console.print(f"it begins with: {printable(begun)[:300]}")
        tools = [getattr(environment, name) for name in source.description["tools"]]
    else:
        tools = tools_of(source)
    schemas = {tool.__name__: get_json_schema(tool) for tool in tools}
    problems = []
    for tool in tools:
        problems += check_tool(tool, schemas[tool.__name__], examples, console)
    return problems + (play(kind, schemas, rows, console) if kind else [])


def check_rewards(
    taskset: str, arguments: dict[str, Any], description: dict[str, Any], timeout: float, console: Console
) -> list[str]:
    """Print the first prompt of a taskset and what its rewards give to some replies; return the problems."""
    rows, table, problems = description["rows"], [], []
    for message in rows[0]["prompt"] if rows else []:
        console.print(f"{message['role']}: {printable(message['content'])[:300]}")
    if not rows:
        return ["it has no tasks"]
    if description["tools"] and description["state"]:
        console.print("its rewards read the state of an episode, which only a run has")
        return []
    for name, weight in description["rewards"].items():
        kwargs = {"name": name, "environment_id": taskset, "environment_args": arguments}
        with closing(Reward(f"{MODULE}.reward", name, kwargs, timeout=timeout)) as reward:
            start, earned = time.monotonic(), []
            columns = {"prompts": [row["prompt"] for row in rows], COLUMN: [row[COLUMN] for row in rows]}
            for reply in ("", "0", "I do not know."):
                completions = [[{"role": "assistant", "content": reply}]] * len(rows)
                earned += [value for value in reward.score(completions=completions, **columns) if value is not None]
            each = (time.monotonic() - start) / (3 * len(rows))
            lowest, highest = (f"{f(earned):g}" for f in (min, max)) if earned else ("none", "none")
            table.append([name, f"{weight:g}", lowest, highest, f"{1000 * each:.1f}"])
            problems += [f"{name}: {count} replies could not be scored: {why}" for why, count in reward.errors.items()]
    print_table(console, ["reward of replies without sense"], ["weight", "lowest", "highest", "ms"], table)
    return problems


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f'{text}: not a JSON object, as {{"expression": "1 + 2"}} is')
    return value


def main() -> None:
    """Run the command line."""
    fn = "path/to/file.py:name or package.module.name, of a function or an environment; or verifiers:NAME, a taskset"
    parser = options("grpo.tools.check", __doc__, fn, "rows of the data, for an environment's reset", timeout=5)
    parser.add_argument("--environment-id", help="task.environment_id of the run")
    parser.add_argument("--environment-args", type=json_object, default={}, help="task.environment_args, as JSON")
    parser.add_argument("--arguments", type=json_object, action="append", default=[], help="JSON that it has to take")
    args = parser.parse_intermixed_args()
    logging.disable(logging.WARNING)  # errors are in the tables
    run("grpo.tools.check", partial(check, args), "a run can use it")


if __name__ == "__main__":
    main()
