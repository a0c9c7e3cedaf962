"""The check of each transfer of weights to vLLM: no false alarm in 200 steps of each way, and what it costs.

`python -m benchmarks.transfers` takes twenty minutes on two cores, prints tables and writes benchmarks/transfers.json.
The built-in policy trains by `grpo.train` at a learning rate of 1e-6, at which hardly a bit of it changes in bfloat16,
with vLLM beside it and with a server. SmolLM2-135M's steps give the cost. Runs that the file has are not made again.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import psutil
from peft import LoraConfig
from rich.console import Console
from rich.table import Table

from benchmarks.engine_check import in_process, trainer
from benchmarks.generation import smollm2
from grpo.config.options import Engine
from grpo.config.schema import ROOT
from grpo.generation.vllm_engine import PolicyEngine
from grpo.rundir.files import read_json, write_json
from grpo.rundir.versions import versions
from grpo.utils.patching import replaced

FILE = ROOT / "benchmarks" / "transfers.json"
STEPS = 200
RUN = [
    f"train.max_steps={STEPS}",
    "train.learning_rate=1e-6",
    "train.per_device_train_batch_size=16",
    "train.num_generations=4",
    "train.save_strategy=no",
    "task.eval.size=0",
]
ALONE = "generation=vllm_colocate"
WAYS: dict[str, list[str]] = {
    "all weights": [ALONE],
    "a merged adapter": [ALONE, "peft=lora", "engine.lora=merged"],
    "an adapter": [ALONE, "peft=lora", "engine.share_weights=false"],
    "an adapter, frozen weights shared": [ALONE, "peft=lora"],
    "an adapter, a quantized policy": [ALONE, "peft=qlora"],
    "an adapter, two processes": [ALONE, "peft=lora", "launch.processes=2"],
    "an adapter, a server": ["generation=vllm_server", "peft=lora"],
}
DTYPES = {
    "float32": ["model.dtype=float32", "train.bf16=false"],
    "bfloat16": ["model.dtype=bfloat16", "train.bf16=true", "train.use_cpu=true"],
}
REFUSED = ("an adapter, a quantized policy", "float32")
"""vLLM quantizes in half precision alone."""
COSTS = {"all weights": None, "an adapter": LoraConfig(r=32, lora_alpha=64, target_modules="all-linear")}
COST_STEPS = 8
"""After the first, which compares all weights."""


def healthy(way: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Train with one way of a transfer; return the steps that were done, and what ended the run earlier."""
    line = [*WAYS[way], *DTYPES[dtype], *RUN, f"hydra.run.dir={folder}/run"]
    server = None
    if "generation=vllm_server" in line:
        line.append(f"train.vllm_server_port={free_port()}")
        server = started([*line[:-2], line[-1], f"hydra.run.dir={folder}/server"])
    try:
        command = [sys.executable, "-m", "grpo.train", *line]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    finally:
        if server:
            end(server)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {"steps": summary["steps"], "ended": done.stderr.splitlines()[-1] if done.returncode else None}


def free_port() -> int:
    """Return a port of this machine that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def started(line: list[str]) -> psutil.Process:
    """Return a server that was started for a command line."""
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "grpo.serve", *line, "--", "--enforce-eager"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **small}, check=True, cwd=ROOT)
    return psutil.Process(int(done.stdout.rpartition("kill ")[2].split()[0]))


def end(server: psutil.Process) -> None:
    """End a server and wait for its processes."""
    family = [server, *server.children(recursive=True)]
    server.terminate()
    psutil.wait_procs(family, timeout=60)


def cost(peft_config: LoraConfig | None) -> dict[str, float]:
    """Return the seconds of a check and of a step of SmolLM2-135M in bfloat16."""
    spent: list[float] = []
    check = PolicyEngine.check_transfer

    def timed(engine: PolicyEngine) -> None:
        start = time.perf_counter()
        check(engine)
        spent.append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder, replaced(PolicyEngine, "check_transfer", timed):
        options: dict[str, Any] = {"model": smollm2(), "dtype": "bfloat16", "max_steps": 1 + COST_STEPS}
        options |= {"max_completion_length": 64, "learning_rate": 1e-6, "num_generations": 8}
        engine = Engine("adapter" if peft_config else "merged")
        made = trainer(Path(folder), peft_config=peft_config, engine=engine, **options)
        made.train()
    steps = [row["step_time"] for row in made.state.log_history if "step_time" in row]
    return {"check_s": sum(spent[1:]) / COST_STEPS, "first_check_s": spent[0], "step_s": sum(steps[1:]) / COST_STEPS}


def main() -> None:
    """Run the benchmark."""
    console = Console()
    results: dict[str, Any] = {"healthy": {}, "cost": {}} | read_json(FILE)
    results |= {"date": str(date.today()), "versions": versions()}
    for way, dtype in product(WAYS, DTYPES):
        if (name := f"{way}, {dtype}") not in results["healthy"] and (way, dtype) != REFUSED:
            with tempfile.TemporaryDirectory() as folder:
                results["healthy"][name] = healthy(way, dtype, Path(folder))
            write_json(FILE, results)
            console.print(name, results["healthy"][name])
    for name, peft_config in COSTS.items():
        results["cost"][name] = in_process(partial(cost, peft_config))
        console.print(name, results["cost"][name])
    table = Table("", "check, s", "all weights, s", "step, s", "fraction", title="SmolLM2-135M, bfloat16")
    for name, row in results["cost"].items():
        numbers = (row["check_s"], row["first_check_s"], row["step_s"])
        table.add_row(name, *(f"{number:.3g}" for number in numbers), f"{numbers[0] / numbers[2]:.2%}")
    console.print(table)
    write_json(FILE, results)


if __name__ == "__main__":
    main()
