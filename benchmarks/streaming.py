"""The start and the memory of a run on a million problems, read while it trains or before: `benchmarks/streaming.json`.

`python -m benchmarks.streaming` writes a file of short problems and trains two steps on it in both ways.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from benchmarks.demo import ROOT

RUN = ["task=jsonl", "task.conversational=false", "train.max_completion_length=16", "train.max_steps=2"]
RUN += ["train.per_device_train_batch_size=16", "train.num_generations=4", "train.save_strategy=no"]
WAYS = {
    "before": ["task.split='train[200:]'", "task.eval.split='train[:200]'"],
    "while it trains": ["task.dataset.streaming=true"],
}
"""When the problems are read, and the options for it; 200 problems are held out."""


def write_problems(file: Path, rows: int) -> None:
    """Write short problems, each of them once."""
    with file.open("w") as lines:
        for number in range(rows):
            question = f"Mia has {number} pens . She gets {number % 7} more . How many pens does she have now ?"
            lines.write(json.dumps({"question": question, "answer": str(number + number % 7)}) + "\n")


def measure(file: Path, folder: Path, options: list[str]) -> dict[str, float]:
    """Train, and return seconds and CPU seconds until the first step has been logged, and memory and disk, GiB."""
    line = [sys.executable, "-m", "grpo.train", *RUN, *options, f"task.dataset.path={file}", f"hydra.run.dir={folder}"]
    environment = os.environ | {"HF_DATASETS_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    began, metrics, found = time.monotonic(), folder / "metrics.jsonl", dict[str, float]()
    with subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        process, peak = psutil.Process(run.pid), 0
        while run.poll() is None:
            peak = max(peak, process.memory_info().rss)
            if not found and metrics.exists() and metrics.stat().st_size:
                seconds, used = time.monotonic() - began, process.cpu_times()
                found = {"seconds": round(seconds, 1), "cpu_seconds": round(used.user + used.system, 1)}
            time.sleep(0.05)
    cached = sum(one.stat().st_size for one in (folder / "cache").rglob("*") if one.is_file())
    return found | {"host_gib": round(peak / 2**30, 2), "cache_gib": round(cached / 2**30, 3)}


def main() -> None:
    """Measure both ways, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "streaming.json")
    args = parser.parse_args()
    result: dict[str, Any] = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "rows": args.rows}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problems.jsonl"
        write_problems(file, args.rows)
        result["file_gib"] = round(file.stat().st_size / 2**30, 3)
        for place, (when, options) in enumerate(WAYS.items()):
            result[when] = measure(file, Path(folder) / str(place), options)
            print(f"problems read {when}: {result[when]}")
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
