"""Steps of the demo on an idle machine and on a busy one, for several settings of OpenMP.

Threads of OpenMP spin while they wait for each other. Where another program has a core, a spinning thread takes the
time slice of the one that it waits for. `python -m benchmarks.busy` runs the demo alone, beside one program per core,
and beside a second demo, and writes `benchmarks/busy.json`: a quarter of an hour on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SETTINGS: dict[str, dict[str, str]] = {
    "ours": {},
    "OpenMP's own": {"GOMP_SPINCOUNT": ""},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": ""},
    "one thread": {"OMP_NUM_THREADS": "1"},
    **{f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in (1_000, 30_000)},
}
LOADS = ("idle", "one busy program per core", "beside another demo")


def train(settings: dict[str, str], run_dir: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start the demo for a few steps without its evaluation. An empty setting unsets a variable."""
    command = [sys.executable, "-c", LAUNCH, "task.eval.size=0", f"train.max_steps={steps}", f"hydra.run.dir={run_dir}"]
    changed = {key: value for key, value in {**os.environ, **settings}.items() if value}
    unset = {"UNSET": ",".join(key for key, value in settings.items() if not value)}
    return subprocess.Popen(command, env=changed | unset, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


LAUNCH = """
import os, sys
import grpo
for name in filter(None, os.environ["UNSET"].split(",")):
    os.environ.pop(name, None)
from grpo.train import main
main()
"""


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """Keep so many cores busy."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def seconds_per_step(settings: dict[str, str], load: str, steps: int) -> float:
    """Return the median time of a step, without the first."""
    with tempfile.TemporaryDirectory() as folder:
        beside = train(settings, Path(folder) / "beside", 10_000) if load == "beside another demo" else None
        with busy((os.cpu_count() or 1) if load == "one busy program per core" else 0):
            train(settings, Path(folder) / "run", steps).wait()
        if beside:
            beside.kill()
            beside.wait()
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return round(median(row["step_time"] for row in rows[1:]), 3)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    table = Table("s/step", *LOADS)
    for name in options.settings:
        results[name] = {load: seconds_per_step(SETTINGS[name], load, options.steps) for load in LOADS}
        table.add_row(name, *(f"{seconds:.2f}" for seconds in results[name].values()))
        Console().print(table)
    versions = {name: version(name) for name in ("torch", "trl", "transformers")}
    content = {
        "date": str(date.today()),
        "cpu_cores": os.cpu_count(),
        "versions": versions,
        "seconds_per_step": results,
    }
    if not options.no_write:
        (HERE / "busy.json").write_text(json.dumps(content | {"seconds_per_step": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
