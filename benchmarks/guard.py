"""Guarded runs that are unstable by construction, and healthy ones: final accuracy, rollbacks, and the guard's time.

`python -m benchmarks.guard` makes 53 runs of 40 steps, about an hour on one core, prints a line per run, and writes
`benchmarks/guard.json` and the table of docs/guard.md:

- 30 that are unstable: three recipes, ten seeds each, from a policy that a first run has trained,
- three of these without a guard, a seed of each recipe,
- 20 healthy ones, from the built-in policy, which look at every fifth step: a rollback of these is false.

Final accuracy is that of `model/`, of the problems of the looks and of all held-out problems. Results of runs that are
in `--output` are not repeated.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.pages import write_part
from grpo.config.schema import ROOT
from grpo.extras.testing.commands import Forked
from grpo.rundir.files import read_json, read_lines, write_json
from grpo.rundir.versions import versions

FILE = ROOT / "benchmarks" / "guard.json"
PAGE = ROOT / "docs" / "guard.md"
OUTPUT = ROOT / "outputs" / "benchmarks" / "guard"
STEPS = 40
COMMON = (f"train.max_steps={STEPS}", "train.save_steps=1000", "train.log_completions=false", "train.report_to=none")
LONG_NUMBERS = "benchmarks.guard_rewards.long_numbers"
UNSTABLE = {
    "learning rate ten times too high": ("train.learning_rate=3e-3",),
    "a reward that can be hacked": ("reward=[]", f"+reward.long_numbers.fn={LONG_NUMBERS}", "train.learning_rate=1e-3"),
    "ten updates of the same rollouts, without clipping": (
        *("train.num_iterations=10", "train.epsilon=1e6", "train.learning_rate=1e-3"),
    ),
}
"""Overrides of the recipes that are unstable by construction, by their names."""
HEALTHY = "healthy"
SEEDS, WITHOUT = 10, 1
WORSE = 0.02
"""Fraction of accuracy by which the model may be below the best look."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A run: its recipe, its seed, and whether it is guarded."""

    recipe: str
    seed: int
    is_guarded: bool

    @property
    def name(self) -> str:
        """Name of its folder."""
        number = [*UNSTABLE, HEALTHY, "start"].index(self.recipe)
        return f"{number}-{self.seed}{'' if self.is_guarded else '-without'}"

    def overrides(self, start: Path) -> list[str]:
        """Return the command line; unstable runs begin with the model in `start`."""
        words = [*COMMON, f"train.seed={self.seed}", *UNSTABLE.get(self.recipe, ())]
        words += [f"model.model_name_or_path={start}"] if self.recipe in UNSTABLE else []
        words += ["guard=accuracy"] if self.is_guarded else []
        return words + (["guard.every=5"] if self.recipe == HEALTHY else [])


def cases() -> list[Case]:
    """Return all runs, seed by seed, so that those of an hour are of all recipes."""
    order: list[Case] = []
    for seed in range(SEEDS):
        order += [Case(recipe, seed, True) for recipe in UNSTABLE]
        order += [Case(HEALTHY, number, True) for number in (2 * seed, 2 * seed + 1)]
        order += [Case(recipe, seed, False) for recipe in UNSTABLE if seed < WITHOUT]
    return order


def train(case: Case, folder: Path, start: Path) -> Result:
    """Make a run and return its summary."""
    shutil.rmtree(folder, ignore_errors=True)
    line = [sys.executable, "-m", "grpo.train", *case.overrides(start), f"hydra.run.dir={folder}"]
    with Forked(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        _, errors = process.communicate()
    summary = read_json(folder / "summary.json")
    if summary.get("status") != "completed":
        raise RuntimeError(f"{case}: {errors}")
    return summary


def measure(case: Case, output: Path, start: Path) -> Result:
    """Return the result of a run, from `output` if it is there."""
    folder = output / case.name
    if not (folder / "result.json").is_file():
        summary = train(case, folder, start)
        result: Result = {"recipe": case.recipe, "seed": case.seed, "guarded": case.is_guarded}
        result |= {key: summary[key] for key in ("accuracy_before", "accuracy_after", "steps", "wall_time_s")}
        if case.is_guarded:
            looks = read_lines(folder / "guard.jsonl")
            result |= {"looks": [[look["step"], look["accuracy"], look["event"]] for look in looks]}
            result |= {"best": max(look["accuracy"] for look in looks), "time": summary["guard"]["time"]}
            result["final"] = final(folder, len(looks[0]["answers"]))
        write_json(folder / "result.json", result)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
    return read_json(folder / "result.json")


def final(folder: Path, samples: int) -> float:
    """Return the accuracy of the model for the problems that the looks have seen."""
    correct = {row["problem"]: row["correct"] for row in read_lines(folder / "evaluation_after.jsonl")}
    return sum(correct[len(correct) * row // samples] for row in range(samples)) / samples


def falls(result: Result) -> int:
    """Return at how many looks accuracy had fallen."""
    return sum(event in ("rollback", "fall") for _, _, event in result["looks"])


def summary(results: list[Result]) -> list[Result]:
    """Return a row per recipe."""
    rows = []
    for recipe in (*UNSTABLE, HEALTHY):
        runs = [result for result in results if result["recipe"] == recipe and result["guarded"]]
        without = [result["accuracy_after"] for result in results if result["recipe"] == recipe and result not in runs]
        row: Result = {"recipe": recipe, "runs": len(runs)}
        row["fell"] = sum(falls(result) > 0 for result in runs)
        row["kept_best"] = sum(result["final"] >= result["best"] - WORSE for result in runs)
        row |= {name: median(result[name] for result in runs) for name in ("accuracy_before", "accuracy_after", "time")}
        row |= {"looks": len(runs[0]["looks"]), "without": median(without) if without else None}
        rows.append(row)
    return rows


def table(rows: list[Result]) -> str:
    """Return the table of docs/guard.md."""
    names = ["recipe", "runs", "a fall was seen in", "model within 2 points of the best look", "accuracy before"]
    names += ["after, without a guard", "after", "time of the guard"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        without = f"{row['without']:.1%}" if row["without"] is not None else "–"
        cells = [row["recipe"], row["runs"], row["fell"], row["kept_best"], f"{row['accuracy_before']:.1%}"]
        cells += [without, f"{row['accuracy_after']:.1%}", f"{row['time']:.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the runs that are missing, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder that keeps the results of runs")
    parser.add_argument("--minutes", type=float, default=1e9, help="no run begins later; the next call continues")
    parser.add_argument("--table", action="store_true", help="write the table of the runs in benchmarks/guard.json")
    args = parser.parse_args()
    if not args.table:
        os.environ["OMP_NUM_THREADS"] = "1"  # of the commands
        output = args.output.resolve()
        start = output / "start" / "model"
        if not start.is_dir():
            train(Case("start", 1000, False), start.parent, start)
        every, results, end = cases(), [], time.monotonic() + 60 * args.minutes
        for number, case in enumerate(every, 1):
            if time.monotonic() > end:
                break
            results.append(measure(case, output, start))
            print(f"{number}/{len(every)} {json.dumps(results[-1])}", flush=True)
        content = {"date": str(date.today()), "versions": versions(), "summary": summary(results), "runs": results}
        FILE.write_text(json.dumps(content, indent=1) + "\n")
    write_part(PAGE, "benchmarks.guard", table(json.loads(FILE.read_text())["summary"]))


if __name__ == "__main__":
    main()
