"""The experiment `shapes` for several seeds: a table, `benchmarks/shapes.json` and `docs/shapes.png`.

`python -m benchmarks.shapes` takes about three minutes per seed. After each run the policy answers the held-out
questions once more, about white images: what it gets right then, it did not see.
"""

import argparse
import json
import os
from datetime import date
from pathlib import Path

from PIL import Image
from rich.console import Console

from benchmarks.demo import ROOT, draw, run_demo, show
from grpo.data.images import COLUMN, prompt_of
from grpo.data.task import load_held_out
from grpo.generation.local import Completer
from grpo.model import policy
from grpo.rundir.run_dir import read_run


def accuracy_without_images(run_dir: Path) -> float:
    """Return the share of held-out questions that a run's policy answers correctly about white images."""
    run = read_run(run_dir)
    model, processor = policy.load(run.model, run.config.model)
    problems, _ = load_held_out(run.config.task, processor)
    blanks = [[Image.new("RGB", image.size, "white") for image in problem[COLUMN]] for problem in problems]
    prompts = [prompt_of(problem | {COLUMN: blank}) for problem, blank in zip(problems, blanks, strict=True)]
    answers = Completer(model, processor, run.config.train.max_completion_length)(prompts)
    return sum(text.strip() == problem["answer"] for text, problem in zip(answers, problems, strict=True)) / len(
        answers
    )


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration; with any, no files are written")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        result, run_dir = run_demo(seed, ["+experiment=shapes", *args.overrides])
        runs.append(result | {"after_without_images": accuracy_without_images(run_dir)})
    show(runs)
    Console().print("without images:", *(f"seed {run['seed']} {run['after_without_images']:.1%}" for run in runs))
    if not args.overrides:
        result = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "runs": runs}
        (ROOT / "benchmarks" / "shapes.json").write_text(json.dumps(result) + "\n")
        draw(runs, ROOT / "docs" / "shapes.png")


if __name__ == "__main__":
    main()
