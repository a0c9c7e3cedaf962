"""The unit test of a reward, before a GPU hour is spent on it: `python -m rewards.check correctness`.

Tries a reward on right answers, on wrong ones, and on what policies do to cheat. Says what earned more than it should,
and leaves with status 1 if something did. With `--run RUN_DIR` it shows what a changed reward makes of the completions
of a run. Examples: `rewards.check my_rewards.py:brevity limit=60 --data rows.jsonl`, `rewards.check format --run
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

from rewards.probing.probes import final
from rewards.probing.trial import Probe, score, try_out
from rewards.runtime.isolation import Reward, RewardError
from rewards.runtime.loader import FROM_TRL

HERE = Path(__file__).parent
LENGTH = 512  # tokens, where a reward's configuration asks for the limit of completions


def show(name: str, probes: list[Probe], seconds: float, console: Console) -> list[str]:
    """Print the table and return what is wrong, one line each."""
    console.print(f"{name}, {1000 * seconds:.2f} ms a completion", highlight=False, markup=False, soft_wrap=True)
    table = Table("", "completion")
    for heading in ("mean", "spread", "lowest", "highest", "too much"):
        table.add_column(heading, justify="right")
    wrong = []
    for probe in probes:
        there = [one for one in probe.rewards if one is not None]
        numbers = [f"{f(there):.2f}" for f in (mean, pstdev, min, max)] if there else ["none"] * 4
        mark = f"[red]{len(probe.too_much)} of {len(probe.rewards)}[/]" if probe.too_much else ""
        table.add_row(probe.kind, probe.name.replace("[", "\\["), *numbers, mark)
        if probe.too_much:
            wrong.append(
                f"{probe.name}: earned more than it should on {len(probe.too_much)} of {len(probe.rewards)} rows"
            )
    console.print(table)
    there = [one for probe in probes for one in probe.rewards if one is not None]
    if not there:
        wrong.append("it gave no reward at all")
    elif min(there) == max(there):
        what = "if it looks for another form, give it right completions with --data, in a column `completion`"
        wrong.append(f"it gave {there[0]:.2f} to everything; {what}")
    return wrong


def options_of(name: str, given: list[str], run: Path | None = None) -> tuple[str, dict[str, Any]]:
    """Return `fn` and `kwargs` of a reward: as in a run, else as in `conf/reward`, and then as `key=value` says."""
    kwargs: dict[str, Any] = {}
    config = OmegaConf.load(run / ".hydra" / "config.yaml") if run and (run / ".hydra").is_dir() else None
    if config and name in config.reward:
        options: dict[str, Any] = OmegaConf.to_container(config.reward[name], resolve=True)  # type: ignore[assignment]
        name, kwargs = options["fn"], dict(options.get("kwargs") or {})
    elif re.fullmatch(r"\w+", name) and find_spec(f"rewards.{name}"):
        text = (HERE.parent / "conf" / "reward" / f"{name}.yaml").read_text()
        shipped = yaml.safe_load(text.replace("${train.max_completion_length}", str(LENGTH)))[name]
        kwargs = {key: value for key, value in shipped.get("kwargs", {}).items() if value != "???"}
        name = shipped["fn"]
    for text in given:
        key, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"{text}: write key=value, for a keyword argument of the reward")
        kwargs[key] = yaml.safe_load(value)
    return name, kwargs


def read_rows(file: Path | None, name: str, count: int) -> list[dict[str, Any]]:
    """Return rows of a JSONL file, or the examples that come with the reward."""
    own = HERE / "examples" / f"{name}.jsonl"
    source = file or (own if own.is_file() else HERE / "examples" / "problems.jsonl")
    with source.open() as lines:
        rows = [final(json.loads(line)) for line in islice((line for line in lines if line.strip()), count)]
    if not rows:
        raise ValueError(f"{source}: there are no rows in it")
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m rewards.check", description=__doc__.splitlines()[0])
    parser.add_argument("reward", help="a built-in reward, path/to/file.py:function, package.module.function")
    parser.add_argument("kwargs", nargs="*", metavar="key=value", help="keyword arguments of the reward")
    parser.add_argument("--data", type=Path, help="JSONL with question, answer, solution or completion, and columns")
    parser.add_argument("--rows", type=int, default=50, help="how many rows of the data are tried")
    parser.add_argument("--run", type=Path, help="a run directory: score its completions instead")
    parser.add_argument("--name", help="under which the run logged the reward; the function's name if left out")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds a call may take")
    asked = parser.parse_intermixed_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        fn, kwargs = options_of(asked.reward, asked.kwargs, asked.run)
        name = asked.name or re.split(r"[.:]", fn)[-1]
        reward = Reward(fn, name, kwargs, timeout=asked.timeout)
        if asked.run:
            from rewards.probing.compare import compare_with_run

            compare_with_run(asked.run, reward, partial(score, reward), console)
            wrong = []
        else:
            rows = read_rows(asked.data, name, asked.rows)
            missing = [column for column in reward.needs if column not in (*rows[0], *FROM_TRL)]
            if missing:
                raise ValueError(f"{fn} needs a column {missing[0]}; the rows have: {', '.join(rows[0])}")
            wrong = show(f"{fn} {kwargs}", *try_out(reward, rows), console)
        reward.close()
    except RewardError as error:
        wrong = [str(error)]
    except (ValueError, OSError) as error:
        print(f"rewards.check: {error}", file=sys.stderr)
        sys.exit(2)
    wrong += [f"{count} completions could not be scored: {kind}" for kind, count in reward.errors.items()]
    for line in wrong:
        console.print(f"[red]{line}[/]", highlight=False, soft_wrap=True)
    if not wrong and not asked.run:
        console.print("[green]nothing earned more than it should[/]")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
