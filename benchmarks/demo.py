"""The demo for several seeds: a table, `benchmarks/demo.json` and `docs/learning_curve.png`.

`python -m benchmarks.demo` takes about a minute per seed; the first is that of `make demo`. It also writes the table of
docs/first_run.md. `python -m benchmarks.demo +experiment=shapes` prints the table of another experiment.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.pages import ROOT, write_part

RESULT, PAGE = ROOT / "benchmarks" / "demo.json", ROOT / "docs" / "first_run.md"
OF_THE_DEMO = 42
"""`train.seed` of a command line without one."""


def run_demo(seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run the demo once; return its results, with the total time in seconds."""
    run_dir = ROOT / "outputs" / "benchmarks" / f"demo-{date.today()}-{time.time_ns()}-seed-{seed}"
    command = [sys.executable, "-m", "grpo.train", f"train.seed={seed}", f"hydra.run.dir={run_dir}", *overrides]
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    summary = json.loads((run_dir / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "seconds": round(seconds, 1),
        "steps": summary["steps"],
        "peak_host_gb": round(summary["memory/host_gb"], 2),
        "versions": summary["versions"],
        "curve": [round(row["rewards/correctness/mean"], 3) for row in metrics],
    }


def show(runs: list[dict[str, Any]]) -> None:
    """Print one row per run."""
    table = Table("seed", "before", "after", "steps", "seconds", "peak host GiB")
    for run in runs:
        before, after = f"{run['before']:.1%}", f"{run['after']:.1%}"
        table.add_row(str(run["seed"]), before, after, str(run["steps"]), str(run["seconds"]), str(run["peak_host_gb"]))
    Console().print(table)


def part(runs: list[dict[str, Any]]) -> str:
    """Return the table of docs/first_run.md."""
    lines = ["| seed (`train.seed=`) | before | after | steps | seconds |", "|---|---|---|---|---|"]
    for run in runs:
        seed = f"{run['seed']}, that of `make demo`" if run["seed"] == OF_THE_DEMO else run["seed"]
        accuracies = f"{run['before']:.1%} | {run['after']:.1%}".replace("%", " %")
        lines.append(f"| {seed} | {accuracies} | {run['steps']} | {run['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the sampled accuracy at each step, and the greedy accuracy on held-out problems at both ends."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    for run in runs:
        steps = range(1, len(run["curve"]) + 1)
        (line,) = axes.plot(steps, run["curve"], linewidth=1, alpha=0.7, label=f"seed {run['seed']}")
        ends = [(0, run["before"]), (run["steps"], run["after"])]
        axes.plot(*zip(*ends, strict=True), "o", color=line.get_color(), markersize=6, clip_on=False)
    axes.plot([], [], "o", color="grey", label="greedy, held out")
    finish(figure, axes, "GRPO step (128 completions)", path)


def finish(figure: Any, axes: Any, label: str, path: Path) -> None:
    """Label, format and save a plot of the accuracy."""
    axes.set(xlabel=label, ylabel="accuracy", ylim=(0, 1), xlim=(0, None))
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[OF_THE_DEMO, 0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration; with any, no files are written")
    args = parser.parse_args()
    runs = [run_demo(seed, args.overrides) for seed in args.seeds]
    show(runs)
    if not args.overrides:
        result = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "runs": runs}
        RESULT.write_text(json.dumps(result) + "\n")
        write_part(PAGE, "benchmarks.demo", part(runs))
        draw(runs, ROOT / "docs" / "learning_curve.png")


if __name__ == "__main__":
    main()
