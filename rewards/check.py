"""The unit test of a reward, before a GPU hour is spent on it: `python -m rewards.check correctness`.

Tries a reward on correct answers, on incorrect ones, and on cheats of policies. Prints which earned more than they
should, and exits with status 1 if any did. With `--run RUN_DIR` it shows which completions of a run get another reward
now. Examples: `rewards.check my_rewards.py:brevity limit=60 --data rows.jsonl`, `rewards.check format --run
outputs/2026-01-01/12-00-00`.
"""

import argparse
import json
import re
import sys
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import yaml
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from rewards.isolation.loader import FROM_TRL
from rewards.isolation.reward import Reward, RewardError
from rewards.probing.probes import final
from rewards.probing.trial import Probe, score, try_out

HERE = Path(__file__).parent
LENGTH = 512
"""Longest completion, tokens, for rewards whose configuration has `${train.max_completion_length}`."""


def show(name: str, probes: list[Probe], seconds: float, console: Console) -> list[str]:
    """Print the table and return the problems, one line each."""
    console.print(f"{name}, {1000 * seconds:.2f} ms per completion", highlight=False, markup=False, soft_wrap=True)
    table = Table("", "completion")
    for heading in ("mean", "spread", "lowest", "highest", "too much"):
        table.add_column(heading, justify="right")
    problems = []
    for probe in probes:
        given = [reward for reward in probe.rewards if reward is not None]
        numbers = [f"{f(given):.2f}" for f in (mean, pstdev, min, max)] if given else ["none"] * 4
        mark = f"[red]{len(probe.too_much)} of {len(probe.rewards)}[/]" if probe.too_much else ""
        table.add_row(probe.kind, probe.name.replace("[", "\\["), *numbers, mark)
        if probe.too_much:
            problems.append(
                f"{probe.name}: earned more than it should on {len(probe.too_much)} of {len(probe.rewards)} rows"
            )
    console.print(table)
    given = [reward for probe in probes for reward in probe.rewards if reward is not None]
    if not given:
        problems.append("it gave no reward at all")
    elif min(given) == max(given):
        advice = "if it looks for another format, give it correct completions with --data, in a column `completion`"
        problems.append(f"it gave {given[0]:.2f} to everything; {advice}")
    return problems


def fn_and_kwargs(name: str, arguments: list[str], run: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Return `fn` and `kwargs` of a reward, from a run or `conf/reward`, with `key=value` arguments on top.

    Raises:
        ValueError: an argument is not `key=value`.
    """
    kwargs: dict[str, Any] = {}
    resolved = run / "resolved_config.yaml" if run else None
    config = OmegaConf.load(resolved) if resolved and resolved.is_file() else None
    if config and name in config.reward:
        options: dict[str, Any] = OmegaConf.to_container(config.reward[name], resolve=True)  # type: ignore[assignment]
        name, kwargs = options["fn"], dict(options.get("kwargs") or {})
    elif re.fullmatch(r"\w+", name) and find_spec(f"rewards.{name}"):
        text = (HERE.parent / "conf" / "reward" / f"{name}.yaml").read_text()
        shipped = yaml.safe_load(text.replace("${train.max_completion_length}", str(LENGTH)))[name]
        kwargs = {key: value for key, value in shipped.get("kwargs", {}).items() if value != "???"}
        name = shipped["fn"]
    for text in arguments:
        key, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{text}: write key=value, for a keyword argument of the reward")
        kwargs[key] = yaml.safe_load(value)
    return name, kwargs


def read_rows(file: Path | None, name: str, count: int) -> list[dict[str, Any]]:
    """Return the first `count` rows of a JSONL file, or of the examples that come with the reward.

    Raises:
        ValueError: the file is empty.
    """
    own = HERE / "examples" / f"{name}.jsonl"
    source = file or (own if own.is_file() else HERE / "examples" / "problems.jsonl")
    with source.open() as lines:
        rows = [final(json.loads(line)) for line in islice((line for line in lines if line.strip()), count)]
    if not rows:
        raise ValueError(f"{source}: the file has no rows")
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m rewards.check", description=__doc__.splitlines()[0])
    parser.add_argument("reward", help="a built-in reward, path/to/file.py:function, package.module.function")
    parser.add_argument("kwargs", nargs="*", metavar="key=value", help="keyword arguments of the reward")
    parser.add_argument("--data", type=Path, help="JSONL with question, answer, solution or completion, and columns")
    parser.add_argument("--rows", type=int, default=50, help="rows of the data to try; default: 50")
    parser.add_argument("--run", type=Path, help="a run directory: score its completions instead")
    parser.add_argument("--name", help="name of the reward in the run; default: that of the function")
    parser.add_argument("--timeout", type=float, default=60.0, help="limit of a call, seconds; default: 60")
    args = parser.parse_intermixed_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        fn, kwargs = fn_and_kwargs(args.reward, args.kwargs, args.run)
        name = args.name or re.split(r"[.:]", fn)[-1]
        reward = Reward(fn, name, kwargs, timeout=args.timeout)
        if args.run:
            from rewards.probing.compare import compare_with_run

            compare_with_run(args.run, reward, partial(score, reward), console)
            problems = []
        else:
            if "environments" in reward.needs:
                raise ValueError(f"{fn} reads environments, which only a run has (task.environment)")
            rows = read_rows(args.data, name, args.rows)
            missing = [column for column in reward.needs if column not in (*rows[0], *FROM_TRL)]
            if missing:
                raise ValueError(f"{fn} needs a column {missing[0]}; the rows have: {', '.join(rows[0])}")
            problems = show(f"{fn} {kwargs}", *try_out(reward, rows), console)
        reward.close()
    except RewardError as error:
        problems = [str(error)]
    except (ValueError, OSError) as error:
        print(f"rewards.check: {error}", file=sys.stderr)
        sys.exit(2)
    problems += [f"{count} completions could not be scored: {kind}" for kind, count in reward.errors.items()]
    for line in problems:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if not problems and not args.run:
        console.print("[green]nothing earned more than it should[/]")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
