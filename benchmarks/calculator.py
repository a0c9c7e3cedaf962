"""The experiment `calculator` for several seeds: a table, `benchmarks/calculator.json` and `docs/calculator.png`.

`python -m benchmarks.calculator` takes about two minutes per seed.
"""

import argparse
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.demo import ROOT, finish, run_demo, show


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy of samples and the calls per completion at each step."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    for number, run in enumerate(runs):
        steps = range(1, len(run["curve"]) + 1)
        for key, color, label in (("calls", "tab:grey", "calls per completion"), ("curve", "tab:blue", "accuracy")):
            axes.plot(steps, run[key], color=color, linewidth=1, alpha=0.7, label=None if number else label)
        ends = [(0, run["before"]), (run["steps"], run["after"])]
        axes.plot(*zip(*ends, strict=True), "o", color="tab:blue", markersize=6, clip_on=False)
    axes.plot([], [], "o", color="tab:blue", label="greedy, held out")
    finish(figure, axes, "GRPO step (128 completions)", path)
    axes.set_ylabel("accuracy, calls")
    figure.savefig(path)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration; with any, no files are written")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        result, run_dir = run_demo(seed, ["+experiment=calculator", *args.overrides])
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        runs.append(result | {"calls": [round(row["tools/call_frequency"], 3) for row in rows]})
    show(runs)
    if not args.overrides:
        result = {"date": str(date.today()), "cpu_cores": len(os.sched_getaffinity(0)), "runs": runs}
        (ROOT / "benchmarks" / "calculator.json").write_text(json.dumps(result) + "\n")
        draw(runs, ROOT / "docs" / "calculator.png")


if __name__ == "__main__":
    main()
