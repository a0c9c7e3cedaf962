"""The demo by stock TRL and by ours, complete steps: the same learning, never slower.

`python -m benchmarks.train` takes two minutes per run, three seeds by both in turns; it prints a table and writes
`benchmarks/train.json` and `docs/train_by_both.png`.
"""

import argparse
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.demo import finish

ROOT = Path(__file__).resolve().parents[1]


def train_with_stock_trl(arguments: list[str]) -> None:
    """Run `python -m grpo.train` with stock TRL's trainer, and OpenMP as users of TRL have it."""
    import grpo.train  # before PyTorch, which then reads the variable

    os.environ.pop("GOMP_SPINCOUNT")
    from trl import GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    import grpo.run.trainer
    from grpo.generation.vllm.engine import PolicyEngine
    from grpo.trainer.measurements import MemoryReadings
    from grpo.utils.patching import replaced

    class StockEngine(PolicyEngine):  # on a CPU it takes weights only after the preparation by ours
        _iter_named_params = VLLMGeneration._iter_named_params
        sync_weights = VLLMGeneration.sync_weights
        generate = VLLMGeneration.generate

    class StockTrainer(GRPOTrainer):
        stop_reason, sharded = None, False

        def __init__(self, **options: Any) -> None:
            self.memory = MemoryReadings(on_gpu=False)
            known = inspect.signature(GRPOTrainer).parameters
            with replaced(grpo_trainer, "VLLMGeneration", StockEngine):
                super().__init__(**{name: value for name, value in options.items() if name in known})

        def _generate(self, prompts: list) -> Any:
            started = time.perf_counter()
            result = super()._generate(prompts)
            self._metrics["train"]["time/generate"].append(time.perf_counter() - started)
            return result

    grpo.run.trainer.ExactGRPOTrainer = StockTrainer  # type: ignore[misc,assignment]
    sys.argv = ["grpo.train", *arguments]
    grpo.train.main()


def run(trainer: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run the demo by its command and return its results."""
    return measured(trainer, seed, trained(trainer, f"train-{trainer}-{seed}", [f"train.seed={seed}", *overrides]))


def trained(trainer: str, name: str, overrides: list[str]) -> Path:
    """Run the command of a trainer, `trl` or `ours`, as a user does, and return the run directory."""
    run_dir = ROOT / "outputs" / "benchmarks" / f"{date.today()}-{time.time_ns()}-{name}"
    module = ["grpo.train"] if trainer == "ours" else ["benchmarks.train", "--stock"]
    command = [sys.executable, "-m", *module, f"hydra.run.dir={run_dir}", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return run_dir


def measured(trainer: str, seed: int, run_dir: Path) -> dict[str, Any]:
    """Return accuracy, memory and median step time from a run directory."""
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "trainer": trainer,
        "seed": seed,
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "step_s": round(statistics.median(row["step_time"] for row in rows), 3),
        "steps_s": round(sum(row["step_time"] for row in rows), 1),
        "generate_s": round(statistics.median(row["time/generate"] for row in rows), 3),
        "update_s": round(statistics.median(row["time/update"] for row in rows), 3) if trainer == "ours" else None,
        "peak_host_gb": round(summary["memory/host_gb"], 2),
        "curve": [round(row["rewards/correctness/mean"], 3) for row in rows],
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the sampled accuracy over time, each seed by both."""
    figure, axes = plt.subplots(figsize=(7, 3.6), dpi=150)
    for trainer, color, label in (("trl", "tab:grey", "stock TRL"), ("ours", "tab:blue", "this trainer")):
        for number, each in enumerate(run for run in runs if run["trainer"] == trainer):
            seconds = [each["steps_s"] * (step + 1) / len(each["curve"]) for step in range(len(each["curve"]))]
            axes.plot(seconds, each["curve"], color=color, linewidth=1, label=label if number == 0 else None)
    finish(figure, axes, "seconds of training", path)


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--stock", action="store_true", help="run grpo.train with stock TRL, for the benchmark itself")
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration; with any, no files are written")
    args = parser.parse_args()
    if args.stock:
        train_with_stock_trl(args.overrides)
        return
    runs = []
    for seed in args.seeds:
        for trainer in ("trl", "ours"):
            runs.append(run(trainer, seed, args.overrides))
    table = Table("seed", "trainer", "before", "after", "s/step", "of which update", "160 steps", "peak host GiB")
    for each in runs:
        accuracy = [f"{each[when]:.1%}" for when in ("before", "after")]
        numbers = [str(each[name] or "") for name in ("step_s", "update_s", "steps_s", "peak_host_gb")]
        table.add_row(str(each["seed"]), each["trainer"], *accuracy, *numbers)
    Console().print(table)
    if not args.overrides:
        result = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "runs": runs}
        (ROOT / "benchmarks" / "train.json").write_text(json.dumps(result) + "\n")
        draw(runs, ROOT / "docs" / "train_by_both.png")


if __name__ == "__main__":
    main()
