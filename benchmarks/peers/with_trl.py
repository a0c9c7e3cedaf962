"""The update by stock TRL, or by this trainer; see `benchmarks.peers`."""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from benchmarks.peers.turns import gradient_of, serve
from benchmarks.update import WORKLOADS, trainer_for, update
from grpo.trainer import ExactGRPOTrainer

CLASSES = {"trl": GRPOTrainer, "ours": ExactGRPOTrainer}


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=list(CLASSES))
    parser.add_argument("workload")
    parser.add_argument("model")
    parser.add_argument("rows", type=int)
    args = parser.parse_args()
    args.device, args.budget = "cpu", "auto"
    trainer = trainer_for(CLASSES[args.name], WORKLOADS[args.workload], args, str(args.folder / args.name))

    def work() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        seconds, peak, _ = update(trainer, args.rows)  # this trainer's readings reset the peak
        return {"seconds": round(seconds, 2), "peak_gib": round(peak, 2)}, gradient_of(trainer.model)

    serve({name: version(name) for name in ("trl", "transformers", "torch")}, args.folder, work)


if __name__ == "__main__":
    main()
