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


def run_in_this_process(trainer: str, run_dir: Path, overrides: list[str]) -> None:
    """Run the demo, with stock TRL's trainer for `trl`."""
    from hydra import compose, initialize_config_dir
    from trl import GRPOTrainer
    from trl.generation.vllm_generation import VLLMGeneration
    from trl.trainer import grpo_trainer

    import grpo.run.session
    import grpo.run.trainer
    from grpo.config.resolve import resolve
    from grpo.config.schema import register
    from grpo.generation.vllm_engine import PolicyEngine
    from grpo.planning.fit import make_plan
    from grpo.trainer.memory_readings import MemoryReadings
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

    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", overrides)
    if trainer == "trl":
        grpo.run.trainer.ExactGRPOTrainer = StockTrainer  # type: ignore[misc,assignment]
    run_dir.mkdir(parents=True)
    plan = make_plan(config)
    grpo.run.session.run(resolve(config, plan), run_dir, plan)


def run(trainer: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Run the demo in a process of its own and return its results."""
    run_dir = ROOT / "outputs" / "benchmarks" / f"train-{date.today()}-{time.time_ns()}-{trainer}-{seed}"
    command = [sys.executable, "-m", "benchmarks.train", "--only", trainer, "--directory", str(run_dir)]
    subprocess.run([*command, f"train.seed={seed}", *overrides], check=True, stdout=subprocess.DEVNULL)
    return measured(trainer, seed, run_dir)


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
    parser.add_argument(
        "--only", choices=["trl", "ours"], help="a single run in this process, for the benchmark itself"
    )
    parser.add_argument("--directory", type=Path, help="run directory for --only")
    parser.add_argument("overrides", nargs="*", help="overrides of the configuration; with any, no files are written")
    args = parser.parse_args()
    if args.only:
        run_in_this_process(args.only, args.directory, args.overrides)
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
