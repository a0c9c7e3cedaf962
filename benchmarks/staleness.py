"""Wall time and learning with rollouts in flight, and a slow reward: `benchmarks/staleness.json`.

`python -m benchmarks.staleness` starts a vLLM server on this machine and trains the demo's policy with an adapter, with
each number of updates in turn. The reward sleeps, as an LLM judge does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.demo import ROOT
from tests.servers import ended, free_port, started

RUN = ["generation=vllm_server", "peft=lora", "train.learning_rate=1e-3", "train.save_strategy=no", "task.eval.size=64"]
RUN += ["train.per_device_train_batch_size=64", "train.num_generations=8"]
RUN += ["train.vllm_importance_sampling_mode=token_mask"]
SLOW = """import time

from rewards.correctness import correctness


def slow(completions, answer, **columns):
    time.sleep({seconds})
    return correctness(completions, answer)
"""


def measure(folder: Path, options: list[str]) -> dict[str, Any]:
    """Train, and return seconds, accuracies and what happened to the rollouts."""
    line = [sys.executable, "-m", "grpo.train", *RUN, *options, f"hydra.run.dir={folder}"]
    subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "step_time" in row]
    evaluation = json.loads((folder / "evaluation.json").read_text())
    return {
        "seconds_per_step": round(mean(row["step_time"] for row in rows[2:]), 3),
        "training_seconds": round(sum(row["step_time"] for row in rows), 1),
        "mean_staleness": round(mean(row.get("sampling/staleness", 0.0) for row in rows), 2),
        "dropped_completions": sum(row.get("rollout/dropped", 0) for row in rows),
        "masked_fraction": round(mean(row.get("sampling/masked_share", 0.0) for row in rows), 4),
        "reward": [round(mean(row["reward"] for row in part), 3) for part in (rows[:10], rows[-10:])],
        "accuracy": [evaluation[when]["accuracy"] for when in ("before", "after")],
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reward-seconds", type=float, default=1.0)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "staleness.json")
    args = parser.parse_args()
    found: dict[str, Any] = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "steps": args.steps}
    found |= {"reward_seconds": args.reward_seconds, "runs": {}}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "slow.py").write_text(SLOW.format(seconds=args.reward_seconds))
        server = started(folder / "server", port, f"engine.staleness={max(args.staleness)}")
        try:
            for staleness in args.staleness:
                options = [f"train.max_steps={args.steps}", f"train.vllm_server_port={port}"]
                options += [f"reward.correctness.fn={folder}/slow.py:slow", f"engine.staleness={staleness}"]
                found["runs"][staleness] = measure(folder / str(staleness), options)
                print(f"engine.staleness={staleness}: {found['runs'][staleness]}", flush=True)
        finally:
            ended(server)
    base = found["runs"].get(0, {}).get("training_seconds")
    for run in found["runs"].values():
        run["speed_up"] = round(base / run["training_seconds"], 2) if base else None
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
