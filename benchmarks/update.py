"""One policy update by stock TRL and by ours, on the same rollouts, in turns: time, memory and gradient.

A first round of both, in which kernels are compiled, is not counted; then they take turns to go first.
`python -m benchmarks.update` prints a table and writes `benchmarks/update_cpu.json`: SmolLM2-135M's shape in float32,
about an hour on two cores. On a GPU it takes the shapes of Qwen2.5-1.5B and 7B, in bfloat16 with LoRA and gradient
checkpointing, and writes `benchmarks/update_cuda.json`.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging
from trl import GRPOTrainer

from benchmarks.peak import read_peak, reset_peak
from grpo.config.schema import ROOT
from grpo.options import Update
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import make, relative_difference

GROUP = 8
LONGEST = 256


def log_normal(generator: torch.Generator) -> int:
    """Return a completion length as policies have them: about 80 tokens on average, at most 256."""
    return min(LONGEST, 1 + int(math.exp(math.log(62) + 0.8 * float(torch.randn(1, generator=generator)))))


def full(generator: torch.Generator) -> int:
    """Return the limit: every completion reaches it."""
    return LONGEST


class Workload(NamedTuple):
    """The completions of an update."""

    name: str
    length: Callable[[torch.Generator], int]
    """Draws the length of a completion."""
    prompt: int
    """Tokens of the longest prompt."""
    equal: float
    """Fraction of zero-variance groups."""
    group: int = GROUP
    """Completions per prompt."""
    longest: int = LONGEST
    """Tokens of the longest completion."""


WORKLOADS = {
    "a": Workload("log-normal lengths, half of the groups equal", log_normal, 96, 0.5),
    "b": Workload("log-normal lengths", log_normal, 96, 0.0),
    "c": Workload("equal lengths", full, 96, 0.0),
    "d": Workload("long prompts", log_normal, 512, 0.0),
}


TOY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TOY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 500}
HYBRID = {"model_type": "qwen3_5_text", "hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 8}
HYBRID |= {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 32768}
HYBRID |= {"linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64}
HYBRID |= {"linear_value_head_dim": 64, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {"toy": TOY, "hybrid": HYBRID}
"""Shapes beside those of `conf/model`; the hybrid has the proportions of Qwen3.5-0.8B, half as wide."""


def build_policy(model: str, device: str, dtype: torch.dtype | None = None) -> Any:
    """Return a policy with random weights of the shape of a choice of `conf/model`, or of one of `SHAPES`.

    Args:
        dtype: of the weights; None takes bfloat16 on a GPU and float32 without one.
    """
    shape = SHAPES.get(model) or yaml.safe_load((ROOT / "conf" / "model" / f"{model}.yaml").read_text())["shape"]
    shape = {name: value for name, value in shape.items() if name != "parameters"}
    torch.manual_seed(0)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=dtype)


def rollout(workload: Workload, rows: int) -> tuple[dict[str, Any], list[float]]:
    """Return fixed rollouts and their rewards; prompts have between half and all of the longest length."""
    generator = torch.Generator().manual_seed(1)
    prompts, completions, rewards = [], [], []
    for group in range(rows // workload.group):
        size = int(workload.prompt * (0.5 + 0.5 * float(torch.rand(1, generator=generator))))
        prompt = torch.randint(3, 80, (size,), generator=generator).tolist()
        for _ in range(workload.group):
            prompts.append(prompt)
            completions.append(torch.randint(3, 80, (workload.length(generator),), generator=generator).tolist())
            constant = group < workload.equal * (rows // workload.group)
            rewards.append(0.0 if constant else float(torch.rand(1, generator=generator)))
    return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}, rewards


def trainer_for(
    trainer_class: type[GRPOTrainer],
    workload: Workload,
    args: argparse.Namespace,
    folder: str,
    adapter: bool = True,
    compile: bool | str = "auto",
) -> GRPOTrainer:
    """Return a trainer whose rollouts are the workload's; TRL's slices have a group each.

    Args:
        trainer_class: TRL's, or ours.
        workload: the completions.
        args: `model`, `device`, `rows` and `budget` of `main`.
        folder: of its files.
        adapter: whether LoRA adapters are trained on a GPU; otherwise all weights.
        compile: whether our layers are compiled.
    """
    fixed, rewards = rollout(workload, args.rows)
    on_gpu = args.device == "cuda"
    options = Update(max_tokens_per_microbatch=args.budget, compile=compile)
    trainer = make(
        trainer_class,
        Path(folder),
        model=build_policy(args.model, args.device),
        rollout_func=lambda prompts, trainer: fixed,
        reward_funcs=lambda **kwargs: rewards,
        per_device_train_batch_size=workload.group,
        gradient_accumulation_steps=args.rows // workload.group,
        num_generations=workload.group,
        max_completion_length=workload.longest,
        gradient_checkpointing=on_gpu,
        bf16=on_gpu,
        peft_config=LoraConfig(r=16, target_modules="all-linear") if on_gpu and adapter else None,
        **({"update": options} if trainer_class is ExactGRPOTrainer else {}),
    )
    trainer.create_optimizer()
    if on_gpu:  # as `train` does
        trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)
    trainer.current_gradient_accumulation_steps = args.rows // workload.group
    return trainer


def update(
    trainer: GRPOTrainer, rows: int, inputs: list[dict[str, Any]] | None = None
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Compute the gradient of one optimizer step; return seconds, peak memory above the start in GiB, and gradient."""
    trainer.model.zero_grad(set_to_none=True)
    group = trainer.num_generations
    inputs = inputs or [{"prompt": f"{row // group}"} for row in range(rows)]
    torch.manual_seed(0)
    trainer._step = 0
    slices = rows // group
    ours = isinstance(trainer, ExactGRPOTrainer)
    if ours:
        trainer.memory.highest.clear()
    start_memory = reset_peak()
    started = time.perf_counter()
    for place in range(slices):
        trainer.accelerator.gradient_state._set_sync_gradients(place == slices - 1)
        trainer.training_step(trainer.model, inputs, None)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak = read_peak()
    if ours:  # whose readings reset the peak
        peak = max(peak, trainer.memory.highest["memory/update_gb"])
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    return seconds, peak - start_memory, gradients


def turns(repeats: int) -> list[tuple[str, str]]:
    """Return who updates first and who second in each round; the first round is the warm-up."""
    return [("ours", "trl") if place % 2 else ("trl", "ours") for place in range(1 + repeats)]


def measure(workload: str, args: argparse.Namespace) -> dict[str, Any]:
    """Update by both in turns, `args.repeats` times after a warm-up, in which kernels are compiled."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = trainer_for(GRPOTrainer, WORKLOADS[workload], args, folder)
        ours = trainer_for(ExactGRPOTrainer, WORKLOADS[workload], args, folder)
        ours.model.load_state_dict(theirs.model.state_dict())
        times: dict[str, list[float]] = {"trl": [], "ours": []}
        peaks: dict[str, list[float]] = {"trl": [], "ours": []}
        for first, second in turns(args.repeats):
            gradients = {}
            for name in (first, second):
                trainer = theirs if name == "trl" else ours
                seconds, peak, gradients[name] = update(trainer, args.rows)
                times[name].append(round(seconds, 3))
                peaks[name].append(round(peak, 3))
                trainer.model.zero_grad(set_to_none=True)
            difference = relative_difference(gradients["ours"], gradients["trl"])
        for values in (*times.values(), *peaks.values()):
            del values[0]  # of the warm-up
    metrics = ours._metrics["train"]
    return {
        "workload": f"({workload}) {WORKLOADS[workload].name}",
        "model": args.model,
        "seconds": times,
        "time_ratio": round(statistics.median(times["trl"]) / statistics.median(times["ours"]), 2),
        "peak_gb": peaks,
        "memory_ratio": round(statistics.median(peaks["trl"]) / statistics.median(peaks["ours"]), 2),
        "gradient_difference": difference,
        **{name: metrics[name][-1] for name in ("update/microbatches", "update/padded_tokens", "update/rows_skipped")},
        "update/max_tokens_per_microbatch": metrics["update/max_tokens_per_microbatch"][-1],
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--rows", type=int, default=64, help="completions per step, in groups of 8")
    parser.add_argument("--repeats", type=int, default=2, help="updates by each that are counted")
    parser.add_argument("--budget", default="auto", type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--models", nargs="+", help="names of conf/model, or toy or hybrid")
    parser.add_argument("--output", type=Path, help="by default update_cpu.json or update_cuda.json in benchmarks/")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    logging.set_verbosity_error()
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.output = args.output or ROOT / "benchmarks" / f"update_{args.device}.json"
    models = args.models or (["qwen2_5_1_5b", "qwen2_5_7b"] if args.device == "cuda" else ["smollm2_135m"])
    table = Table("", "TRL s", "ours s", "faster", "TRL GiB", "ours GiB", "less", "gradient")
    results = []
    for args.model in models:
        for workload in args.workloads:
            result = measure(workload, args)
            results.append(result)
            seconds, peaks = result["seconds"], result["peak_gb"]
            table.add_row(
                f"({workload}) {args.model}",
                *(f"{statistics.median(seconds[name]):.1f}" for name in ("trl", "ours")),
                f"{result['time_ratio']:.2f}x",
                *(f"{statistics.median(peaks[name]):.2f}" for name in ("trl", "ours")),
                f"{result['memory_ratio']:.2f}x",
                f"{result['gradient_difference']:.1e}",
            )
            Console().print(table)
            if not args.no_write:
                write(results, args)
    for workload in args.workloads:
        Console().print(f"({workload}) {WORKLOADS[workload].name}", highlight=False)


def write(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write the results so far."""
    machine = {"device": args.device, "cpu_cores": os.cpu_count(), "rows": args.rows}
    if args.device == "cuda":
        machine["card"] = torch.cuda.get_device_name()
    versions = {name: version(name) for name in ("torch", "trl", "transformers", "peft")}
    content = {"date": str(date.today()), **machine, "versions": versions, "results": results}
    args.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
