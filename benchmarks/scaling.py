"""One process and two with a thread each, the same completions: throughput, waiting, bytes sent.

`python -m benchmarks.scaling` prints a table and writes `benchmarks/scaling.json`: SmolLM2-135M's shape in float32,
about twenty minutes on two cores that do nothing else. Waiting on 2, 4 and 8 processes is simulated from recorded
lengths (`benchmarks/recorded_lengths.json`) and the cost of micro-batches that the trainer plans with.
`--record FOLDER` reads the lengths from the folder of an evaluation, `python -m grpo.evaluate … evaluate.samples=8`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from trl import GRPOTrainer

from benchmarks.update import GROUP, LONGEST, build_policy, rollout
from grpo.config.options import Update
from grpo.config.schema import ROOT, register
from grpo.data.task import prompt_lengths
from grpo.model import policy
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.microbatch import cost, pack
from grpo.trainer.update import balance, step_update
from tests.stock_trl import make

BUDGET = 1024
"""Tokens per micro-batch."""
WORKLOAD = "b"
RECORDED = ROOT / "benchmarks" / "recorded_lengths.json"
CASES = {"one process": 1, "two processes": 2, "without balancing": 2, "stock TRL": 2}


class Sent(TrainerCallback):
    """Bytes that a process gives to reductions and gathers, per step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer, self.bytes, self.reductions = trainer, 0, 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def counted(group: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
            self.bytes += bucket.buffer().nbytes
            self.reductions += bucket.is_last()
            return allreduce_hook(group, bucket)

        if isinstance(self.trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(None, counted)


@contextmanager
def gathers_counted(sent: Sent) -> Iterator[None]:
    """Count what is gathered, too."""
    module = torch.distributed.distributed_c10d
    gather = module.all_gather

    def counted(outputs: Any, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sent.bytes += tensor.nbytes
        return gather(outputs, tensor, *args, **options)

    module.all_gather = torch.distributed.all_gather = counted
    try:
        yield
    finally:
        module.all_gather = torch.distributed.all_gather = gather


def train(case: str, rows: int, steps: int, model: str, file: Path) -> None:
    """Train on this process's part of the completions; the first process writes seconds per step and bytes."""
    processes, rank = CASES[case], int(os.environ.get("RANK", "0"))
    fixed, rewards = rollout(WORKLOAD, rows)
    own = range(rank * rows // processes, (rank + 1) * rows // processes)
    part = {"prompt_ids": [fixed["prompt_ids"][row] for row in own], "logprobs": None}
    part["completion_ids"] = [fixed["completion_ids"][row] for row in own]
    ours = case != "stock TRL"
    if case == "without balancing":
        step_update.can_move = lambda accelerator, batches, sharded: False
    trainer = make(
        ExactGRPOTrainer if ours else GRPOTrainer,
        Path(tempfile.mkdtemp()),
        model=build_policy(model, "cpu"),
        rollout_func=lambda prompts, trainer: part,
        reward_funcs=lambda **kwargs: [rewards[row] for row in own],
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=rows // GROUP // processes,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=steps,
        optim="sgd",
        use_cpu=True,
        ddp_find_unused_parameters=False,
        **({"update": Update(max_tokens_per_microbatch=BUDGET)} if ours else {}),
    )
    sent = Sent(trainer)
    trainer.add_callback(sent)
    with gathers_counted(sent):
        trainer.train()
    rows_of_log = [row for row in trainer.state.log_history if "loss" in row][1:]  # the first step warms up
    if rank == 0:
        times = {name: [row[name] for row in rows_of_log if name in row] for name in ("step_time", "time/wait")}
        found: dict[str, Any] = {"seconds": times["step_time"], "wait_s": times["time/wait"]}
        found |= {"mb_sent_per_step": sent.bytes / steps / 1e6, "reductions_per_step": sent.reductions / steps}
        file.write_text(json.dumps(found))


def run(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Train in processes of their own, with a thread each."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        options = ["--case", case, "--file", str(file), "--rows", str(args.rows), "--steps", str(args.steps)]
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CASES[case]}"]
        line = line if CASES[case] > 1 else [sys.executable]
        line += ["-m", "benchmarks.scaling", *options, "--model", args.model]
        subprocess.run(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        return json.loads(file.read_text())


def record(folder: Path) -> None:
    """Write down how many tokens the prompts and the sampled completions of an evaluation have, by problem."""
    register()
    config: Any = OmegaConf.load(folder / ".hydra" / "config.yaml")
    tokenizer = policy.load_processing_class(config.model)
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    rows = sorted((line for line in lines if line["sample"]), key=lambda line: (line["problem"], line["sample"]))
    texts = [row["completion"] + tokenizer.eos_token for row in rows]
    found = {
        "model": config.model.gguf_file or config.model.model_name_or_path,
        "longest": (longest := config.train.max_completion_length),
        "prompts": prompt_lengths([row["prompt"] for row in rows], tokenizer),
        "completions": [min(longest, len(ids)) for ids in tokenizer(texts)["input_ids"]],
    }
    RECORDED.write_text(json.dumps(found) + "\n")


def simulated(processes: int, in_rounds: bool) -> dict[str, float]:
    """Return the share of a step's time that processes wait on average, each with its own completions or balanced.

    Args:
        in_rounds: whether they meet at each micro-batch, as with sharded weights.
    """
    recorded = json.loads(RECORDED.read_text())
    prompts, completions = recorded["prompts"], recorded["completions"]
    rows = len(prompts) // processes
    price = partial(cost, budget=BUDGET, hidden_size=576)
    own = [
        [price([part]) for part in pack(prompts, completions, BUDGET, range(first, first + rows))]
        for first in range(0, rows * processes, rows)
    ]
    limits = balance.limits(sum(prompts) + sum(completions), processes, BUDGET)
    divisions = [[price([part]) for part in pack(prompts, completions, limit)] for limit in limits]
    chosen, dealt = balance.earliest(divisions, processes, in_rounds)
    after, total = balance.duration(divisions[chosen], dealt, in_rounds), sum(divisions[chosen])
    flat = [one for of in own for one in of]
    place = iter(range(len(flat)))
    before = balance.duration(flat, [[next(place) for _ in of] for of in own], in_rounds)
    return {
        "wait_before": 1 - sum(flat) / processes / before,
        "wait_after": 1 - total / processes / after,
        "time_ratio": before / after,
    }


def main() -> None:
    """Measure, print and write; with --case, be one of the processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64, help="completions per step, in groups of 8")
    parser.add_argument("--steps", type=int, default=3, help="the first one is not counted")
    parser.add_argument("--model", default="smollm2_135m", help="a name of conf/model, or toy")
    parser.add_argument("--no-write", action="store_true")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="read lengths, and measure nothing")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        record(args.record)
        return
    if args.case:
        train(args.case, args.rows, args.steps, args.model, args.file)
        return
    result: dict[str, Any] = {"date": str(date.today()), "model": args.model, "completions": args.rows}
    result["versions"] = {name: version(name) for name in ("torch", "trl", "accelerate")}
    started = time.monotonic()
    measured = {case: run(case, args) for case in CASES}
    table = Table("", "s/step", "mean wait, s", "MB sent per step", "reductions per step", title=args.model)
    for case, found in measured.items():
        found["seconds_per_step"] = statistics.median(found["seconds"])
        wait = f"{statistics.median(found['wait_s']):.2f}" if found["wait_s"] else "-"
        sent = f"{found['mb_sent_per_step']:.1f}"
        table.add_row(case, f"{found['seconds_per_step']:.2f}", wait, sent, f"{found['reductions_per_step']:.0f}")
    ratio = measured["one process"]["seconds_per_step"] / measured["two processes"]["seconds_per_step"]
    console = Console()
    console.print(table)
    console.print(f"two processes are {ratio:.2f} times as fast as one ({time.monotonic() - started:.0f} s in all)")
    waits = Table("processes", "micro-batches", "waiting before", "after", "time before / after")
    result |= {"measured": measured, "speedup": ratio, "simulated": {}}
    for processes in (2, 4, 8):
        for in_rounds in (False, True):
            found = simulated(processes, in_rounds)
            name = "all meet at each" if in_rounds else "each on its own"
            result["simulated"][f"{processes} processes, {name}"] = found
            shares = [f"{100 * found[key]:.0f} %" for key in ("wait_before", "wait_after")]
            waits.add_row(str(processes), name, *shares, f"{found['time_ratio']:.2f}")
    console.print(waits)
    if not args.no_write:
        (ROOT / "benchmarks" / "scaling.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
