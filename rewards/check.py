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
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
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

from rewards.isolation import Reward, RewardError
from rewards.loader import FROM_TRL
from rewards.probes import cheats, corrupted, final, references
from rewards.text import text_of

HERE = Path(__file__).parent
LENGTH = 512  # tokens, where a reward's configuration asks for the limit of completions


@dataclass
class Probe:
    """One kind of completion, tried on every row."""

    kind: str
    name: str
    rewards: list[float | None]
    too_much: list[int]
    """Rows on which it earned more than it should."""


def token_ids(text: str) -> list[int]:
    """Return something like tokens, words and signs, for rewards that count them; equal ones have equal numbers."""
    return [zlib.crc32(word.encode()) for word in re.findall(r"[\u3040-\u9fff]|\w{1,6}|[^\w\s]", text)]


def score(
    reward: Reward, rows: list[dict[str, Any]], completions: list[Any], tokenize: Callable[[str], list[int]] = token_ids
) -> list[float | None]:
    """Return what the reward gives for one completion of each row."""
    columns = {key: [row.get(key) for row in rows] for key in rows[0]} if rows else {}
    ids = [tokenize(text_of(said)) for said in completions]
    prompts = [row.get("prompt", row.get("question", "")) for row in rows]
    return reward.score(**{**columns, "prompts": prompts, "completions": completions, "completion_ids": ids})


def try_out(reward: Reward, rows: list[dict[str, Any]]) -> tuple[list[Probe], float]:
    """Return what each kind of completion earned, and the seconds a completion took.

    A wrong completion or a cheat should earn no more than the right completion of the same row, and less if the reward
    tells right from wrong at all, that is if wrong completions earn less on the average.
    """
    started, count = time.perf_counter(), 0

    def tried(make: Any) -> list[float | None]:
        nonlocal count
        count += len(rows)
        return score(reward, rows, [make(row) for row in rows])

    right = {style: tried(lambda row, style=style: references(row)[style]) for style in references(rows[0])}
    best = max(right, key=lambda style: average(right[style]))
    probes = [Probe("right", style, earned, []) for style, earned in right.items()]
    wrong = {}
    for name in dict.fromkeys(name for row in rows for name in corrupted(row, best)):
        having = [row for row in rows if name in corrupted(row, best)]
        wrong[name] = (having, score(reward, having, [corrupted(row, best)[name] for row in having]))
        count += len(having)
    tells = bool(wrong) and mean(average(earned) for _, earned in wrong.values()) < average(right[best]) - 1e-9
    allowed = dict(zip(map(id, rows), right[best], strict=True))
    for name, (having, earned) in wrong.items():
        probes.append(Probe("wrong", name, earned, above(earned, [allowed[id(row)] for row in having], tells)))
    for name in cheats(rows[0]):
        earned = tried(lambda row, name=name: cheats(row)[name])
        probes.append(Probe("cheat", name, earned, above(earned, right[best], tells)))
    return probes, (time.perf_counter() - started) / count


def above(earned: list[float | None], right: list[float | None], tells: bool) -> list[int]:
    """Return the rows that earned more than the right completion, or as much if the reward tells right from wrong."""
    least = -1e-9 if tells else 1e-9
    pairs = enumerate(zip(earned, right, strict=True))
    return [row for row, (got, due) in pairs if got is not None and due is not None and got >= due + least]


def average(earned: list[float | None]) -> float:
    """Return the mean of the rewards that are there."""
    return mean([one for one in earned if one is not None] or [float("-inf")])


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
            from rewards.compare import compare_with_run

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
