"""Dynamic sampling against training without it, and against stock TRL: accuracy over completions and over time.

`python -m benchmarks.dynamic_sampling` trains the demo and SmolLM2 with three seeds each, three hours on one core. It
prints tables, and writes `benchmarks/dynamic_sampling.json` after every run, and `docs/dynamic_sampling.png`. Runs that
are in the file are not repeated.
"""

import argparse
import itertools
import json
import os
from datetime import date
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.train import trained
from grpo.config.schema import ROOT
from grpo.rundir.versions import versions

FILE = ROOT / "benchmarks" / "dynamic_sampling.json"
TASKS = {"demo": [], "smollm2": ["+experiment=smollm2", "train.max_steps=40"]}
KINDS = {
    "trl": ("stock TRL", "tab:grey", []),
    "ours": ("this trainer", "tab:blue", []),
    "dynamic": ("with dynamic sampling", "tab:orange", ["rollout.dynamic_sampling=true"]),
}
WINDOW = 5
"""Steps over which the accuracy of sampled completions is averaged."""
LEVELS = {"demo": (0.6, 0.75, 0.9, 0.95), "smollm2": (0.5, 0.6, 0.7)}
"""Accuracies for which the table says what they took."""


def run(task: str, kind: str, seed: int) -> dict[str, Any]:
    """Train once in a process of its own, and return the curve: a row per step."""
    overrides = [f"train.seed={seed}", *TASKS[task], *KINDS[kind][2]]
    run_dir = trained("trl" if kind == "trl" else "ours", f"dynamic-{task}-{kind}-{seed}", overrides)
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    batch = summary["completions_a_step"]
    group = 8
    generated = [row.get("rollout/groups_generated", batch / group) * group for row in rows]
    return {
        "task": task,
        "kind": kind,
        "seed": seed,
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "completions": list(map(int, accumulate(generated))),
        "seconds": [round(each, 1) for each in accumulate(row["step_time"] for row in rows)],
        "accuracy": [
            round(row.get("rollout/rewards/correctness/mean", row["rewards/correctness/mean"]), 4) for row in rows
        ],
        "informative": [
            round(row.get("rollout/informative_share", 1 - row["frac_reward_zero_std"]), 3) for row in rows
        ],
    }


def smooth(values: list[float]) -> list[float]:
    """Return the means over the last `WINDOW` values."""
    return [mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]


def first_at(one: dict[str, Any], level: float) -> int | None:
    """Return the first step with at least some accuracy."""
    reached = [step for step, value in enumerate(smooth(one["accuracy"])) if value >= level and step >= WINDOW - 1]
    return reached[0] if reached else None


def show(runs: list[dict[str, Any]]) -> None:
    """Print what each accuracy took, means over the seeds, and the accuracy on held-out problems at the end."""
    table = Table("task", "accuracy of samples", "trainer", "completions", "seconds", "steps", "seeds")
    for task, levels in LEVELS.items():
        for level in levels:
            for kind, (label, _, _) in KINDS.items():
                every = [one for one in runs if (one["task"], one["kind"]) == (task, kind)]
                found = [(one, step) for one in every if (step := first_at(one, level)) is not None]
                cells = ["", "", ""]
                if found:
                    cells = [
                        f"{mean(one['completions'][step] for one, step in found):,.0f}",
                        f"{mean(one['seconds'][step] for one, step in found):.0f}",
                        f"{mean(step + 1 for _, step in found):.0f}",
                    ]
                table.add_row(task, f"{level:.0%}", label, *cells, f"{len(found)} of {len(every)}")
    Console().print(table)
    table = Table("task", "trainer", "seed", "before", "after", "completions", "seconds", "informative, first to last")
    for one in runs:
        accuracy = [f"{one[when]:.1%}" for when in ("before", "after")]
        shares = [f"{mean(part):.0%}" for part in (one["informative"][:10], one["informative"][-10:])]
        numbers = [f"{one['completions'][-1]:,}", f"{one['seconds'][-1]:.0f}", " to ".join(shares)]
        table.add_row(one["task"], KINDS[one["kind"]][0], str(one["seed"]), *accuracy, *numbers)
    Console().print(table)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy over completions and over time, a row per task."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), dpi=150, sharey="row")
    for row, task in zip(axes, TASKS, strict=True):
        for place, (axis, label) in enumerate((("completions", "completions generated"), ("seconds", "seconds"))):
            for kind, (name, color, _) in KINDS.items():
                every = [one for one in runs if (one["task"], one["kind"]) == (task, kind)]
                for number, one in enumerate(every):
                    legend = name if number == 0 else None
                    row[place].plot(one[axis], smooth(one["accuracy"]), color=color, linewidth=1, label=legend)
            row[place].set(xlabel=f"{task}: {label}", ylim=(0, 1), xlim=(0, None))
            row[place].yaxis.set_major_formatter("{x:.0%}")
            row[place].locator_params(axis="x", nbins=6)
            row[place].grid(alpha=0.3)
            row[place].spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("accuracy of samples")
        row[1].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run what is missing, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    result = json.loads(FILE.read_text()) if FILE.is_file() else {"runs": []}
    result |= {"date": str(date.today()), "cpu_cores": len(os.sched_getaffinity(0)), "versions": versions()}
    done = {(one["task"], one["kind"], one["seed"]) for one in result["runs"]}
    for each in itertools.product(args.tasks, KINDS, args.seeds):
        if each not in done:
            result["runs"].append(run(*each))
            FILE.write_text(json.dumps(result) + "\n")
    show(result["runs"])
    draw(result["runs"], ROOT / "docs" / "dynamic_sampling.png")


if __name__ == "__main__":
    main()
