"""A pretrained model learns to add: `benchmarks/smollm2.json`, `docs/smollm2.png`, and ten completions as Markdown.

`python -m benchmarks.smollm2` runs `+experiment=smollm2` for two seeds, ten minutes each on two cores.
"""

import argparse
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.demo import ROOT, draw, run_demo, show

SHOWN = 10


def answers(run_dir: Path, when: str) -> list[dict[str, Any]]:
    """Return the completions of the first held-out problems `before` or `after` training."""
    lines = (run_dir / f"evaluation_{when}.jsonl").read_text().rstrip("\n").split("\n")
    rows = sorted((json.loads(line) for line in lines), key=lambda row: row["problem"])
    return [{key: row[key] for key in ("prompt", "completion", "correct")} for row in rows[:SHOWN]]


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    args = parser.parse_args()
    results = [run_demo(seed, ["+experiment=smollm2"]) for seed in args.seeds]
    runs = [run for run, _ in results]
    show(runs)
    completions = {when: answers(results[0][1], when) for when in ("before", "after")}
    print("| question | before | after |\n|---|---|---|")
    for before, after in zip(completions["before"], completions["after"], strict=True):
        question = before["prompt"].splitlines()[-1]
        cells = [f"`{one['completion']!r}` {'correct' if one['correct'] else 'incorrect'}" for one in (before, after)]
        print(f"| {question} | {' | '.join(cells)} |")
    result = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "runs": runs, "completions": completions}
    (ROOT / "benchmarks" / "smollm2.json").write_text(json.dumps(result) + "\n")
    draw(runs, ROOT / "docs" / "smollm2.png")


if __name__ == "__main__":
    main()
