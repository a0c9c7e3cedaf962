"""Worked solutions of the example `warm_start`."""

import json
import subprocess
import sys
from pathlib import Path

from grpo.builtin.tasks.arithmetic import rows
from grpo.config.schema import ROOT
from rewards.correctness import correctness


def test_the_solutions_are_correct_and_none_is_held_out(tmp_path: Path) -> None:
    script = ROOT / "examples" / "warm_start" / "solutions.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "new")], check=True, cwd=ROOT)
    solutions = [json.loads(line) for line in (tmp_path / "new" / "train.jsonl").read_text().splitlines()]
    answers = {row["question"]: row["answer"] for row in rows("train", 2560, 1)}
    assert len(solutions) == 256
    completions = [row["completion"] for row in solutions]
    known = [answers[row["prompt"].rstrip("\n")] for row in solutions]
    assert correctness(completions=completions, answer=known) == [1.0] * len(solutions)
    assert not {row["prompt"].rstrip("\n") for row in solutions} & {row["question"] for row in rows("test", 500, 0)}


def test_the_page_has_the_measured_numbers() -> None:
    page = (ROOT / "examples" / "warm_start" / "README.md").read_text()
    measured = json.loads((ROOT / "benchmarks" / "warm_start.json").read_text())
    for name in ("from the base", "from the result of trl sft"):
        run = measured[name]
        low, high = run["interval_after"]
        cells = [f"{run['accuracy_before']:.0%}", f"{run['accuracy_after']:.0%} ({low * 100:.0f} to {high:.0%})"]
        cells += [f"{run['mean_reward']:.0%}", f"{run['zero_variance']:.0%}"]
        row = " | ".join(cells).replace("%", " %")
        assert f"| {name} | {row} | {run['seconds']} |" in page
        assert run["steps"] == 20
    assert f"`trl sft` took {measured['sft']['seconds']} seconds" in page
