"""Planted faults that `grpo.doctor` reports, and healthy runs about which it reports none.

`python -m benchmarks.doctor` trains 43 runs of stock TRL, in twenty minutes on two cores, and writes
`benchmarks/doctor.json` and the table of docs/doctor.md. Runs of an earlier call are not trained again.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.pages import ROOT, write_part
from grpo.extras.doctor.diagnose import diagnose
from grpo.extras.doctor.history import History
from grpo.extras.doctor.read import read

PAGE, RESULT = ROOT / "docs" / "doctor.md", ROOT / "benchmarks" / "doctor.json"
STORED = ROOT / "tests" / "unit" / "extras" / "doctor" / "stored"
NAMES = ("learning rate x 100 in the second half", "engine with old weights", "engine in sync", "seed 1")
"""Runs whose metrics are stored for tests."""


def result(name: str, expected: list[str], folder: Path) -> dict[str, Any]:
    """Return the findings about a run, with all its logs and with its metrics alone."""
    history = read(folder)[0]
    reward = [value for _, value in history.values("reward")]
    alone = History(history.source, folder, history.steps)
    return {
        "name": name,
        "expected": expected,
        "reward": [round(sum(part) / 5, 3) for part in (reward[:5], reward[-5:])],
        "findings": named(history),
        "findings_of_metrics": named(alone),
    }


def named(history: History) -> dict[str, str]:
    """Return the severity of each finding about a history."""
    return {diagnosis.name: diagnosis.severity for diagnosis in diagnose(history, None)}


def is_reported(row: dict[str, Any], of: str = "findings") -> bool:
    """Return whether the planted fault of a row is reported as more than information."""
    return any(row[of].get(name, "info") != "info" for name in row["expected"])


def alarms(row: dict[str, Any]) -> list[str]:
    """Return the findings above information."""
    return [name for name, severity in row["findings"].items() if severity != "info"]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results in Markdown."""
    faults = [row for row in rows if row["expected"]]
    healthy = [row for row in rows if not row["expected"]]
    by_metrics = sum(is_reported(row, "findings_of_metrics") for row in faults)
    lines = [
        f"{sum(map(is_reported, faults))} of {len(faults)} planted faults are reported, {by_metrics} of them without "
        "tables of completions;",
        f"{sum(not alarms(row) for row in healthy)} of {len(healthy)} healthy runs have no finding above information.",
        "",
        "| planted fault | findings above information | of the metrics alone |",
        "|---|---|---|",
    ]
    for row in faults:
        cells = [", ".join(f"`{name}`" for name in alarms(row)) or "none"]
        cells.append("yes" if is_reported(row, "findings_of_metrics") else "no")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    lines += ["", "| healthy run | reward | findings above information |", "|---|---|---|"]
    for row in healthy:
        cells = ["{:.2f} -> {:.2f}".format(*row["reward"]), ", ".join(alarms(row)) or "none"]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def store(folder: Path, state: Path) -> None:
    """Store the metrics that rules read, with four digits, as a `trainer_state.json`."""
    rows = [{name: value and float(f"{value:.4g}") for name, value in row.items()} for row in read(state)[0].steps]
    folder.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    (folder / state.name).write_text(f'{{"log_history": [\n{lines}\n]}}\n')


def main() -> None:
    """Train, diagnose, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "benchmarks" / "doctor")
    parser.add_argument("--train", help="train a single case, for the benchmark itself")
    args = parser.parse_args()
    from benchmarks.doctor_runs import FAULTS, HEALTHY, trained

    cases = {case.name: case for case in (*FAULTS, *HEALTHY)}
    folders = {name: args.output / re.sub(r"\W+", "_", name) for name in cases}
    if args.train:
        trained(cases[args.train], folders[args.train])
        return
    rows = []
    for name, case in cases.items():
        if not (folders[name] / "trainer_state.json").is_file():
            command = [sys.executable, "-m", "benchmarks.doctor", "--output", str(args.output), "--train", name]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
        rows.append(result(name, list(case.expected), folders[name]))
        print(f"{name}: {', '.join(alarms(rows[-1])) or 'none'}", flush=True)
    for name in NAMES:
        store(STORED / folders[name].name, folders[name] / "trainer_state.json")
    RESULT.write_text(json.dumps({"runs": rows}, indent=1) + "\n")
    write_part(PAGE, "benchmarks.doctor", table(rows))


if __name__ == "__main__":
    main()
