"""Test a reward before a GPU hour is spent on it: `python -m rewards.check correctness`.

Tries a reward on correct answers, on incorrect answers, and on cheats of policies. Prints completions that earned too
much, and exits with status 1 if there are any. With `--run RUN_DIR` it lists the completions of a run whose reward
changes. Examples: `rewards.check my_rewards.py:brevity limit=60 --data rows.jsonl`, `rewards.check format --run
latest`.
"""

import re
from argparse import Namespace
from contextlib import closing
from difflib import get_close_matches
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.console import Console

from rewards.checking import options, print_table, read_rows, run
from rewards.isolation.reward import Reward, RewardError
from rewards.probing.probes import final
from rewards.probing.runs import named_run
from rewards.probing.tasks import OF_TASK, SHIPPED, configuration, load_yaml, rows_of
from rewards.probing.trial import Probe, fails, try_out

HERE = Path(__file__).parent
GROUP = "grpo.rewards"
"""Entry points of installed rewards."""
LENGTH = 512
"""Longest completion, tokens, for rewards whose configuration has `${train.max_completion_length}`."""


def show(title: str, probes: list[Probe], seconds: float, console: Console) -> list[str]:
    """Print the table and return the problems, a line per problem."""
    console.print(f"{title}, {1000 * seconds:.2f} ms per completion")
    rows, problems = [], []
    for probe in probes:
        values = [reward for reward in probe.rewards if reward is not None]
        numbers = [f"{f(values):.2f}" for f in (mean, pstdev, min, max)] if values else ["none"] * 4
        count = f"{len(probe.too_much)} of {len(probe.rewards)}" if probe.too_much else ""
        rows.append([probe.kind, probe.name, *numbers, count])
        if count:
            problems.append(f"{probe.name}: earned more than it should on {count} rows")
    print_table(console, ["", "completion"], ["mean", "spread", "lowest", "highest", "too much"], rows, "too much")
    earned = {reward for probe in probes for reward in probe.rewards if reward is not None}
    if not earned:
        problems.append("it gave no reward at all")
    elif len(earned) == 1:
        advice = "if it looks for another format, give it correct completions with --data, in a column `completion`"
        problems.append(f"it gave {earned.pop():.2f} to everything; {advice}")
    return problems


def fn_and_kwargs(name: str, arguments: list[str], run: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Return `fn` and `kwargs` of a reward, from a run or `conf/reward`, with `key=value` arguments on top.

    Raises:
        ValueError: an argument is not `key=value`.
    """
    resolved = run / "resolved_config.yaml" if run else None
    rewards = OmegaConf.load(resolved).reward if resolved and resolved.is_file() else {}
    file = configuration("reward", name) if re.fullmatch(r"[\w-]+", name) else None
    if not file and name.isidentifier() and name not in rewards and not list(entry_points(group=GROUP, name=name)):
        known = [*rewards, *(path.stem for path in (SHIPPED / "reward").glob("*.yaml"))]
        close = get_close_matches(name, [*known, *(path.stem for path in Path("conf/reward").glob("*.yaml"))], n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        forms = f"{', '.join(sorted(known))}, or a function, path/to/file.py:function"
        raise ValueError(f"{name}: no reward of that name{meant or f'; possible: {forms}'}")
    if name not in rewards and file:
        grader = "correctness"  # which some rewards refer to
        shipped = [load_yaml(each) for each in (SHIPPED / "reward" / f"{grader}.yaml", file)]
        others = {"train": {"max_completion_length": LENGTH}, "task": {"eval": {"reward": grader}}}
        rewards = OmegaConf.create(others | {"reward": OmegaConf.merge(*shipped)}).reward
    entry: Any = OmegaConf.to_container(rewards[name], resolve=True) if name in rewards else {"fn": name}
    kwargs = {key: value for key, value in (entry.get("kwargs") or {}).items() if value != "???"}
    for text in arguments:
        key, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{text}: write key=value, for a keyword argument of the reward")
        kwargs[key] = yaml.safe_load(value)
    return entry["fn"], kwargs


def rows_for(args: Namespace, name: str, of_task: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the words or the file that name the rows to try, and the rows."""
    if of_task:
        return " ".join(of_task), [final(row) for row in rows_of(of_task, args.rows)]
    shipped = HERE / "examples" / f"{name}.jsonl"
    file = args.data or (shipped if shipped.is_file() else HERE / "examples" / "problems.jsonl")
    return str(file), [final(row) for row in read_rows(file, args.rows)]


def check(args: Namespace, console: Console) -> list[str]:
    """Print the behaviour of a reward, and return the problems, a line per problem.

    Raises:
        ValueError: the reward cannot be loaded, or cannot be tried on this data.
    """
    of_task = [word for word in args.kwargs if OF_TASK.match(word)]
    if of_task and (args.data or args.run):
        raise ValueError(f"{of_task[0]}: a task has its own rows; leave out --data and --run")
    run_dir = named_run(args.run) if args.run else None
    fn, kwargs = fn_and_kwargs(args.fn, [word for word in args.kwargs if word not in of_task], run_dir)
    name = args.name or re.split(r"[.:]", args.fn)[-1]  # of a run its key, as its function may have another
    make = partial(Reward, fn, name, kwargs, timeout=args.timeout)
    with closing(make()) as reward:
        problems: list[str] = []
        try:
            if run_dir:
                from rewards.probing.compare import compare_with_run

                compare_with_run(run_dir, reward, console)
            else:
                if "environments" in reward.needs:
                    raise ValueError(f"{fn} reads environments, which only a run has (task.environment)")
                source, rows = rows_for(args, name, of_task)
                if missing := reward.missing(rows[0]):
                    raise ValueError(
                        f"{fn} needs a column {missing[0]}, or an argument {missing[0]}=…; the rows have: "
                        f"{', '.join(rows[0])}"
                    )
                if not ({"answer", "completion"} & rows[0].keys() or {"question", "solution"} <= rows[0].keys()):
                    raise ValueError(
                        f"{source}: the rows have: {', '.join(rows[0])}; the check makes its completions of a column "
                        "`answer` (with `question`, and `solution`, the way to the answer), or takes a correct "
                        "`completion`: rename the columns of this file"
                    )
                as_messages = fails(make, rows[0]) and not fails(make, rows[0], as_messages=True)
                if as_messages:
                    console.print("completions are messages, as with task.conversational=true: it fails on text")
                problems = show(f"{fn} {kwargs}", *try_out(reward, rows, as_messages), console)
        except RewardError as error:
            problems = [str(error)]
    return problems + [f"{count} completions could not be scored: {kind}" for kind, count in reward.errors.items()]


def main() -> None:
    """Run the command line."""
    fn = "a built-in reward, path/to/file.py:function, package.module.function"
    data = "question, answer, solution or completion, and columns"
    parser = options("rewards.check", __doc__, fn, data, timeout=60)
    parser.add_argument(
        "kwargs", nargs="*", metavar="key=value", help="keyword arguments of the reward; task=NAME_OR_YAML: its rows"
    )
    parser.add_argument("--run", help="a run directory, or latest: score its completions instead")
    parser.add_argument("--name", help="name of the reward in the run; default: that of the function")
    args = parser.parse_intermixed_args()
    run("rewards.check", partial(check, args), "" if args.run else "nothing earned more than it should")


if __name__ == "__main__":
    main()
