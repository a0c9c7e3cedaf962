"""Forecasts of `grpo.preflight` beside what the runs did: groups with non-zero variance, and whether accuracy rose.

`python -m benchmarks.preflight --at-once 2` makes 96 runs (`benchmarks/preflight_cases.py`), about 75 minutes on two
cores, prints tables, and writes `benchmarks/preflight.json` and parts of docs/calibration.md and docs/report.md. 32 of
the runs are sweeps over the learning rate. Per run it calls

- `grpo.preflight` with 256 problems and 8 completions each,
- `grpo.train` with a learning rate of 0 for the fraction of groups with non-zero variance of the policy as it is: the
  mean of at least 320 groups and 20 steps, but not in sweeps,
- `grpo.train` as it is, with an evaluation of 200 held-out problems before and after.

A forecast of the fraction is good within 5 percentage points. A verdict is right if the exit status is 0 and the
accuracy rose, or the exit status is another one and it did not: a rise is one that McNemar's exact test of the answers
to the same problems tells from none (p < 0.05). A finding about learning on the page of a run is a false alarm if the
accuracy rose, and without one a run whose accuracy did not rise is a miss. Parts of runs that are in `--output` are not
repeated.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import preflight_page
from benchmarks.preflight_cases import Case, cases
from grpo.config.schema import ROOT
from grpo.extras.testing.commands import Forked
from grpo.reporting.findings import findings
from grpo.rundir.files import write_json
from grpo.rundir.run_dir import is_run, read_run
from grpo.rundir.versions import versions

FILE = ROOT / "benchmarks" / "preflight.json"
OUTPUT = ROOT / "outputs" / "benchmarks" / "preflight"
SAMPLED = ("preflight.format=json", "preflight.problems=256", "preflight.samples=8")
GROUPS, STEPS = 320, 20
"""With a learning rate of 0, at least."""
NEAR = 0.05
"""Difference up to which a forecast of the fraction is good."""
SIGNIFICANT = 0.05
LEARNING = {"reward_flat", "reward_fell", "accuracy_fell", "hacking", "too_few_steps", "groups_equal", "too_hard"}
"""Findings that say that a run has not learned, or why."""
FORKING = Lock()
"""One command is started at a time."""
Result = dict[str, Any]


def call(module: str, case: Case, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the overrides of a case, and more of them, in a process that is forked with the libraries."""
    line = [sys.executable, "-m", module, *case.overrides, *more, f"hydra.run.dir={folder}"]
    with FORKING:
        process = Forked(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(line, process.returncode, output, errors)


def forecast(case: Case, folder: Path) -> Result:
    """Return what preflight says: its exit status and verdict, and the fraction of groups where it has sampled."""
    done = call("grpo.preflight", case, folder, *SAMPLED)
    if done.returncode in (0, 1):
        report = json.loads(done.stdout)
        now = report["now"]
        rate = {"suggested_rate": report["learning_rate"]["suggested"]}
        found = {"groups_per_step": now["groups_per_step"], **now["fraction"], **rate}
        return {"status": done.returncode, "verdict": report["verdict"], **found}
    reason = done.stderr.strip().splitlines()[-1].partition(" (")[0]
    if "failed on every completion" not in reason:
        raise RuntimeError(f"{case.line}: {done.stderr}")
    return {"status": done.returncode, "verdict": reason}


def train(case: Case, folder: Path, *more: str) -> Result:
    """Train from the beginning, and return the summary of the run."""
    shutil.rmtree(folder, ignore_errors=True)
    done = call("grpo.train", case, folder, *more)
    if not (folder / "summary.json").is_file():
        raise RuntimeError(f"{case.line}: {done.stderr}")
    summary: Result = json.loads((folder / "summary.json").read_text())
    return summary


def unchanged(case: Case, folder: Path, groups_per_step: int) -> Result:
    """Return the fraction of groups with non-zero variance of the policy as it is, and over how many groups.

    Where each reward is normalized, TRL's metric is about the batch, and completions without an advantage are counted.
    """
    steps = max(STEPS, math.ceil(GROUPS / groups_per_step))
    found = train(case, folder, "train.learning_rate=0", f"train.max_steps={steps}", "task.eval.size=0")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    equal = [row["rollout/zero_variance"] for row in rows]
    if "train.multi_objective_aggregation=normalize_then_sum" in case.overrides:
        equal = [row["update/rows_skipped"] / found["completions_a_step"] for row in rows]
    return {"value": 1 - fmean(equal), "groups": len(equal) * groups_per_step}


def trained(case: Case, folder: Path) -> Result:
    """Return the accuracies of a run, how many answers became correct and incorrect, and whether accuracy rose."""
    summary = train(case, folder)
    found = {"status": summary["status"], "steps": summary["steps"], "before": summary["accuracy_before"]}
    if summary["status"] != "completed":
        return {**found, "after": None, "rose": False, "reason": summary["reason"].partition(" (")[0]}
    before, after = (answers(folder / f"evaluation_{when}.jsonl") for when in ("before", "after"))
    gained = sum(after[problem] and not before[problem] for problem in before)
    lost = sum(before[problem] and not after[problem] for problem in before)
    p = sign_test(gained, lost)
    rose = gained > lost and p < SIGNIFICANT
    return {**found, "after": summary["accuracy_after"], "gained": gained, "lost": lost, "p": p, "rose": rose}


def answers(file: Path) -> dict[int, bool]:
    """Return whether each held-out problem was answered correctly."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {row["problem"]: row["correct"] for row in rows}


def sign_test(gained: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test: that changes to either side are equally likely."""
    changed = gained + lost
    tail = sum(math.comb(changed, count) for count in range(max(gained, lost), changed + 1)) / 2**changed
    return min(1.0, 2 * tail)


def measure(case: Case, output: Path) -> Result:
    """Return forecast and run of a case, with those parts that are in `output` already."""
    folder = output / hashlib.sha256(repr(case.overrides).encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)

    def part(name: str, make: Callable[..., Result], *more: Any) -> Result:
        file = folder / f"{name}.json"
        if not file.is_file():
            write_json(file, make(case, folder / name, *more))
        found: Result = json.loads(file.read_text())
        return found

    result: Result = {"kind": case.kind, "can_learn": case.can_learn, "overrides": case.overrides, "line": case.line}
    samples = folder
    if sweeps := case.kind.startswith("sweep"):  # whose runs begin with the same samples
        same = [word for word in case.overrides if not word.startswith("train.learning_rate=")]
        samples = output / hashlib.sha256(repr(same).encode()).hexdigest()[:8]
    result["forecast"] = part("forecast", lambda case, _: forecast(case, samples / "forecast"))
    if "value" in result["forecast"] and not sweeps:
        result["unchanged"] = part("unchanged", unchanged, result["forecast"]["groups_per_step"])
    result["run"] = part("run", trained)
    if is_run(folder / "run"):
        result["run"]["findings"] = [finding.name for finding in findings(read_run(folder / "run"))]
    return result | compared(result)


def compared(result: Result) -> Result:
    """Return the `difference` of both fractions, if it is `near`, and `in_interval`; and if the verdict is `right`."""
    forecast, found = result["forecast"], {}
    if "unchanged" in result:
        value, (low, high) = result["unchanged"]["value"], forecast["interval"]
        difference = forecast["value"] - value
        found = {"difference": difference, "near": abs(difference) <= NEAR, "in_interval": low <= value <= high}
    return {**found, "right": (forecast["status"] == 0) == result["run"]["rose"]}


def summary(results: list[Result]) -> Result:
    """Return how many fractions were near, and how many verdicts right, of those with either."""
    known = [one for one in results if "difference" in one]
    read = [one["run"] for one in results if "findings" in one["run"]]
    alarms = [(bool(LEARNING & {*run["findings"]}), run["rose"]) for run in read]
    said = [(one["forecast"]["status"] == 0, one["run"]["rose"]) for one in results]
    differences = [one["difference"] for one in known] or [0.0]
    return {
        "runs": len(results),
        "cannot_learn": sum(not one["can_learn"] for one in results),
        "rose": sum(rose for _, rose in said),
        "right": sum(one["right"] for one in results),
        "forecast_but_did_not_rise": said.count((True, False)),
        "rose_but_not_forecast": said.count((False, True)),
        "compared": len(known),
        "near": sum(one["near"] for one in known),
        "in_interval": sum(one["in_interval"] for one in known),
        "pages_read": len(read),
        "false_alarms": alarms.count((True, True)),
        "misses": alarms.count((False, False)),
        "mean_difference": fmean(differences),
        "mean_absolute_difference": fmean(map(abs, differences)),
    }


def cells(result: Result) -> list[str]:
    """Return a row about a run."""
    forecast, run = result["forecast"], result["run"]
    shares = ["", "", ""]
    if "difference" in result:
        interval = " to ".join(f"{100 * end:.0f}" for end in forecast["interval"])
        off = f"{100 * result['difference']:+.1f}{'' if result['near'] else ' !'}"
        shares = [f"{forecast['value']:.0%} ({interval})", f"{result['unchanged']['value']:.0%}", off]
    rise = " to ".join("?" if run[when] is None else f"{run[when]:.1%}" for when in ("before", "after"))
    verdict = forecast["verdict"].partition(":")[0] if forecast["status"] < 2 else "refused"
    return [result["line"], *shares, verdict, rise, "right" if result["right"] else "wrong"]


def show(results: list[Result], console: Console) -> None:
    """Print a row per run, and one per kind of run."""
    names = ("run", "forecast", "measured", "points", "verdict", "accuracy", "")
    table = Table(*names, title="groups with non-zero variance, and accuracy")
    for one in results:
        table.add_row(*cells(one))
    console.print(table)
    table = Table("kind", "runs", "within 5 points", "rose", "verdict right")
    for kind in dict.fromkeys(one["kind"] for one in results):
        of_kind = [one for one in results if one["kind"] == kind]
        found = summary(of_kind)
        near = f"{found['near']} of {found['compared']}"
        table.add_row(kind, str(len(of_kind)), near, str(found["rose"]), f"{found['right']} of {len(of_kind)}")
    console.print(table)
    console.print_json(data=summary(results))


def main() -> None:
    """Run what is missing, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder that keeps parts of runs")
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time, a core each")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of runs; with any, the file is not written")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the commands
    console, every = Console(), cases()
    chosen = [case for case in every if case.runs_here and (not args.only or case.number in args.only)]
    for case in every:
        if not case.runs_here:
            console.print(f"skipped, SmolLM2 is not installed: {case.line}", markup=False)
    results: dict[int, Result] = {}
    with ThreadPoolExecutor(args.at_once) as pool:
        began = {pool.submit(measure, case, args.output.resolve()): case.number for case in chosen}
        for number, done in enumerate(as_completed(began), 1):
            results[began[done]] = done.result()
            line = " | ".join(cells(done.result()))
            console.print(f"{number}/{len(chosen)} {line}", markup=False, highlight=False, soft_wrap=True)
    ordered = [results[number] for number in sorted(results)]
    show(ordered, console)
    if not args.only:
        content = {
            "date": str(date.today()),
            "versions": versions(),
            "summary": (total := summary(ordered)),
            "runs": ordered,
        }
        FILE.write_text(json.dumps(content, indent=1) + "\n")
        preflight_page.write(ordered, total)


if __name__ == "__main__":
    main()
