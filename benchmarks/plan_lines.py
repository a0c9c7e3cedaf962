"""The lines of a plan beside what a simulation counts of them, `python -m benchmarks.plan_lines`.

Whole policies of `conf/model` with LoRA and checkpointing compute an update of one sequence, as in
`benchmarks.simulation`. `MemTracker` tells parameters, the optimizer's state and all other tensors apart; the last are
inputs that autograd keeps, and what the head and the backward pass hold for a while. It writes `plan_lines.json`.
"""

import argparse
import json
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.distributed._tools.mem_tracker import _MemRefType as Kind

from benchmarks.simulation import snapshot
from grpo.config.schema import ROOT
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import update
from grpo.planning.workload import Adapter, Workload
from grpo.utils.limits import GB

HERE = Path(__file__).parent
MODELS = ("qwen3_5_4b", "gemma4_e2b", "lfm2_1_2b", "granite4_h_micro")
TOKENS = 1042
LINES = {
    "weights": ({Kind.PARAM, Kind.BUFFER}, ("weights", "adapter")),
    "optimizer": ({Kind.OPT}, ("optimizer",)),
    "all other": ({Kind.GRAD, Kind.ACT, Kind.TEMP, Kind.OTH}, ("gradients", "activations", "backward")),
}
"""Kinds of tensors of the tracker and lines of a plan, which are the same memory."""


def main() -> None:
    """Simulate and plan all models, print a table, and write `plan_lines.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS, help="names of conf/model")
    parser.add_argument("--output", type=Path, default=HERE / "plan_lines.json")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    console = Console()
    results = [compare(model) for model in track(options.models, "simulating", console=console)]
    table = Table("model", "lines of the plan", "simulated GiB", "planned GiB", "difference")
    for row in results:
        for line, (simulated, planned) in row["lines"].items():
            of_plan = " + ".join(LINES[line][1]) if line in LINES else line
            difference = f"{planned / simulated - 1:+.1%}"
            table.add_row(row["model"], of_plan, f"{simulated:.3f}", f"{planned:.3f}", difference)
        table.add_section()
    console.print(table)
    content = {"date": str(date.today()), "torch": torch.__version__, "tokens": TOKENS, "cases": results}
    options.output.write_text(json.dumps(content, indent=1) + "\n")


def compare(model: str) -> dict[str, Any]:
    """Return simulated and planned GiB of each line and in total."""
    started = time.monotonic()
    tensors = snapshot(text_of(model), "lora", True, 1, TOKENS)
    simulated = {line: sum(tensors.get(kind, 0) for kind in kinds) / GB for line, (kinds, _) in LINES.items()}
    simulated["total"] = tensors["Total"] / GB
    plan = planned(model)
    lines = {line: (simulated[line], plan[line]) for line in plan}
    return {"model": model, "lines": lines, "seconds": round(time.monotonic() - started, 1)}


def planned(model: str) -> dict[str, float]:
    """Return planned GiB of each line and in total, but for the context, which is not a tensor."""
    workload = Workload(
        prompt=0,
        completion=TOKENS,
        sequences=1,
        tokens=TOKENS,
        adapter=Adapter(16),
        optimizer="adamw_torch_fused",
        checkpointing=True,
    )
    parts = update(shape_of(text_of(model)), workload)
    lines = {line: sum(parts[name] for name in names) / GB for line, (_, names) in LINES.items()}
    return {**lines, "total": (sum(parts.values()) - parts["context"]) / GB}


def text_of(model: str) -> dict[str, Any]:
    """Return the shape of the language model of a choice of `conf/model`."""
    numbers: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{model}.yaml").shape)
    if "text_config" not in numbers:
        return numbers
    tied = {"tie_word_embeddings": numbers.get("tie_word_embeddings", True)}
    return {"model_type": f"{numbers['model_type']}_text", **tied, **numbers["text_config"]}


if __name__ == "__main__":
    main()
