"""Peak memory of real steps beside the plan, on an NVIDIA GPU: `python -m benchmarks.memory [--cap 16]`.

Twenty cells, four methods x five model sizes with random weights, at the settings of the table that they are compared
with (Oxen.ai, February 2025, an 80 GB H100: batch 1, accumulation 4, 4 generations, prompt 256, completion 786). Each
is a process of its own: one generation, forced to full length, and three optimizer steps of the real trainer. Cells run
concurrently as far as their plans fit. With `--cap 16` the process may take no more than 16 GiB, and the cell is the
profile `+gpu=rtx3080` with its own settings.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from benchmarks.update import TOY
from grpo.config.resolve import resolve
from grpo.config.schema import ROOT, register
from grpo.extras.measuring.training import random_trainer
from grpo.extras.plan_tables.table import LEAST, METHODS
from grpo.planning.advice import Planner
from grpo.planning.fit import HEADROOM, make_plan
from grpo.utils.limits import GB

TIMEOUT = 400
"""Limit of a cell, seconds."""
MODELS = {
    "0.5B": "qwen2_5_0_5b",
    "1B": "llama3_2_1b",
    "3B": "llama3_2_3b",
    "8B": "llama3_1_8b",
    "14B": "qwen2_5_14b",
}
REFERENCE: dict[str, list[float | None]] = {
    "full": [25, 38, 58, None, None],
    "+ 8-bit AdamW": [16, 26, 52, None, None],
    "+ checkpointing": [15, 24, 41, 72, None],
    "LoRA": [13, 16, 32, 58, 69],
}
"""Peak memory by method and model size, in the GB of the source; None ran out of memory."""
MEANS: list[dict[str, str]] = [
    {},
    {"update.gradients_on_host": "true"},
    {"update.gradients_on_host": "true", "train.optim": "paged_adamw_8bit"},
]
"""A cell takes the first of these whose plan needs at most half of the reference, or fits where that did not."""
SETTINGS = [
    "+gpu=h100",
    "train.per_device_train_batch_size=1",
    "train.gradient_accumulation_steps=4",
    "train.num_generations=4",
    "task.max_prompt_length=256",
    "train.max_completion_length=786",
]
TOY_SETTINGS = ["task.max_prompt_length=16", "train.max_completion_length=24", "model.model_name_or_path=toy"]


def main() -> None:
    """Run all cells, or one; print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cap", type=float, help="GiB that a process may take; runs the profile rtx3080 instead")
    parser.add_argument("--cells", nargs="*", help="cells to run, for example 'LoRA 8B'")
    parser.add_argument(
        "--toy", action="store_true", help="tiny shapes and lengths, also without a GPU, to try the code"
    )
    parser.add_argument("--output", type=Path, help="default: memory_cuda.json or memory_cap.json beside this file")
    parser.add_argument("--cell", nargs="*", help=argparse.SUPPRESS)  # for the processes of the cells
    options = parser.parse_args()
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        if options.cell is not None:
            print(json.dumps(run_cell(options.cell, options.cap, options.toy)))
            return
        if not (torch.cuda.is_available() or options.toy):
            sys.exit("benchmarks.memory: needs an NVIDIA GPU; --toy tries the code without one")
        planned = {"rtx3080": profile()} if options.cap else plan_cells(options.cells)
    total = torch.cuda.get_device_properties(0).total_memory / GB if torch.cuda.is_available() else 0.0
    console = Console()
    results = run_all(planned, 0.9 * (options.cap or total), options.cap, options.toy, console)
    console.print(as_table(results))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    versions = {name: version(name) for name in ("torch", "transformers", "trl", "peft", "bitsandbytes")}
    output = options.output or ROOT / "benchmarks" / f"memory_{'cap' if options.cap else 'cuda'}.json"
    content = {
        "date": str(date.today()),
        "device": device,
        "cap_gb": options.cap,
        "versions": versions,
        "cells": results,
    }
    output.write_text(json.dumps(content, indent=1) + "\n")


def profile() -> dict[str, Any]:
    """Return the cell of the profile for a GPU of 16 GB."""
    overrides = ["+gpu=rtx3080"]
    plan = make_plan(compose("config", overrides))
    return {"overrides": overrides, "planned_gb": plan.expected()["peak"], "reference_gb": None}


def plan_cells(names: list[str] | None) -> dict[str, dict[str, Any]]:
    """Return overrides, planned peak without the context, and the reference of each cell."""
    planner = Planner(SETTINGS)
    cells = {}
    for method, row in REFERENCE.items():
        for (size, model), reference in zip(MODELS.items(), row, strict=True):
            name = f"{method} {size}"
            if names and name not in names:
                continue
            goal = reference / 2 if reference else (1 - HEADROOM) * 80
            changes = [{**METHODS[method], **LEAST, "model": model, **means} for means in MEANS]
            plans = [(change, plan) for change in changes if (plan := planner.plan(change))]
            # where none is enough, the settings of the reference
            change, plan = next((pair for pair in plans if pair[1].peak_gb <= goal), plans[0])
            words = [*SETTINGS, *(f"{key}={value}" for key, value in change.items())]
            cells[name] = {"overrides": words, "planned_gb": plan.expected()["peak"], "reference_gb": reference}
    return cells


def run_all(
    cells: dict[str, dict[str, Any]], room: float, cap: float | None, toy: bool, console: Console
) -> list[dict[str, Any]]:
    """Run cells in processes of their own, concurrently while the sum of their plans fits into `room` GiB."""
    running: dict[str, float] = {}
    change = Condition()

    def run(name: str) -> dict[str, Any]:
        cell = cells[name]
        needed = min(cell["planned_gb"] + 1.5, room)
        with change:
            change.wait_for(lambda: not running or sum(running.values()) + needed <= room)
            running[name] = needed
        started = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.memory", *(["--toy"] if toy else [])]
        command += [*(["--cap", str(cap)] if cap else []), "--cell", *cell["overrides"]]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=True)
            measured = json.loads(done.stdout.splitlines()[-1])
        except subprocess.CalledProcessError as error:
            measured = {"error": error.stderr[-400:]}
        except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
            measured = {"error": repr(error)}
        finally:
            with change:
                del running[name]
                change.notify_all()
        console.print(f"{name}: {measured.get('allocated_gb', measured)}", highlight=False, soft_wrap=True)
        return {"cell": name, **cell, **measured, "seconds": round(time.monotonic() - started, 1)}

    largest_first = sorted(cells, key=lambda name: -cells[name]["planned_gb"])
    with ThreadPoolExecutor(1 if toy else 8) as pool:
        results = {result["cell"]: result for result in pool.map(run, largest_first)}
    return [results[name] for name in cells]


def run_cell(overrides: list[str], cap: float | None, toy: bool) -> dict[str, Any]:
    """Train three steps and return their memory, GiB, in a process that does nothing else."""
    if cap and torch.cuda.is_available():
        fraction = cap * GB / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
    config = compose("config", [*overrides, *(TOY_SETTINGS if toy else [])])
    if toy:
        config.model.shape = TOY
    plan = make_plan(config)
    settings = resolve(config, plan)
    with tempfile.TemporaryDirectory() as folder:
        trainer = random_trainer(settings, Path(folder))
        trainer.train()
    readings = trainer.memory.highest
    host = readings["memory/host_gb"]
    return {
        "allocated_gb": readings.get("memory/peak_allocated_gb", host),
        "reserved_gb": readings.get("memory/peak_reserved_gb", host),
        "host_gb": host,
        "phases_gb": {name: readings[f"memory/{name}_gb"] for name in ("generate", "logprobs", "update")},
        "oom_retries": sum(row.get("update/oom_retries", 0) for row in trainer.state.log_history),
        "tokens": trainer.budget.tokens,
        **({"planned_gb": plan.expected()["peak"]} if toy else {}),
    }


def as_table(results: list[dict[str, Any]]) -> Table:
    """Return a table of the cells: measured, planned and reference memory."""
    columns = ("cell", "allocated GiB", "planned GiB", "difference", "reserved GiB", "reference GB", "ratio", "seconds")
    table = Table(*columns)
    for result in results:
        reference = result["reference_gb"]
        numbers = ["failed"] * 4
        if "error" not in result:
            allocated, planned = result["allocated_gb"], result["planned_gb"]
            numbers = [f"{allocated:.2f}", f"{planned:.2f}", f"{planned / allocated - 1:+.1%}"]
            numbers.append(f"{result['reserved_gb']:.2f}")
        ratio = f"{result['allocated_gb'] / reference:.0%}" if reference and "error" not in result else ""
        reference_text = f"{reference:g}" if reference else "out of memory"
        table.add_row(result["cell"], *numbers, reference_text, ratio, f"{result['seconds']:.0f}")
    return table


if __name__ == "__main__":
    main()
