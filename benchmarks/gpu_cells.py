"""What `python -m benchmarks.gpu --cells` runs: updates as prime-rl publishes them, our workloads, and generation.

An update by this trainer with compiled layers and with layers as they are, and by stock TRL, in turns: seconds, tokens
per second, the fraction of the maker's operations per second (MFU), the GPU's peak, and the plan's seconds and GiB.

The MFU counts what has to be computed: four operations (LoRA) or six (all weights) per weight of the matrix products
and token, prompts once per group, and causal attention forward and backward; not what checkpointing computes again, nor
padding. prime-rl's figures are of an H100 (benchmarks/published.json).
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from trl import GRPOTrainer

from benchmarks import gpu_experiments
from benchmarks.gpu_experiments import LORA, TOY, Result, Scale, generating, trainer
from benchmarks.published import FILE, estimated_seconds, planned_gib
from benchmarks.update import WORKLOADS, Workload, rollout, trainer_for, update
from grpo.config import gpus
from grpo.generation.transformers import continuous_batching
from grpo.planning.hub_config import shape_of
from grpo.trainer import ExactGRPOTrainer
from grpo.utils.limits import GB
from grpo.utils.local_gpu import local_gpu
from grpo.utils.patching import replaced

PROMPT = 32
"""Tokens of a cell's prompt, the rest of which is a completion, as prime-rl computes all tokens."""
ROUNDS = 3
"""Updates by each trainer that are counted, after a first one in which kernels are compiled."""
TRAINERS: dict[str, tuple[type[GRPOTrainer], bool]] = {
    "compiled": (ExactGRPOTrainer, True),
    "as they are": (ExactGRPOTrainer, False),
    "trl": (GRPOTrainer, False),
}
"""By name: the class, and whether layers are compiled."""


class Cell(NamedTuple):
    """Updates of a model of `conf/model`."""

    model: str
    workload: Workload
    rows: int
    """Completions per update."""
    adapter: bool
    published: str | None = None
    """The row of benchmarks/published.json with prime-rl's figures, by its `id`."""
    by: tuple[str, ...] = tuple(TRAINERS)


def sequences(tokens: int) -> Workload:
    """Return a workload of two sequences, each a micro-batch."""
    return Workload(f"{tokens:,} tokens", lambda generator: tokens - PROMPT, PROMPT, 0.0, 2, tokens - PROMPT)


OURS = ("compiled", "as they are")
CELLS = {
    "Qwen3-4B LoRA, 16k": Cell("qwen3_4b", sequences(16384), 2, True, "prime-rl-h100-1-Qwen3-4B-lora-16384-recompute"),
    "Qwen3-0.6B full, 16k": Cell(
        "qwen3_0_6b", sequences(16384), 2, False, "prime-rl-h100-1-Qwen3-0.6B-full-16384-recompute"
    ),
    "Qwen3-0.6B LoRA, 16k": Cell(
        "qwen3_0_6b", sequences(16384), 2, True, "prime-rl-h100-1-Qwen3-0.6B-lora-16384-recompute"
    ),
    "(c) Qwen2.5-1.5B": Cell("qwen2_5_1_5b", WORKLOADS["c"], 64, True),
    "Qwen3-4B LoRA, 64k": Cell(
        "qwen3_4b", sequences(65536), 2, True, "prime-rl-h100-1-Qwen3-4B-lora-65536-recompute", OURS
    ),
    **{f"({letter}) Qwen2.5-1.5B": Cell("qwen2_5_1_5b", WORKLOADS[letter], 64, True) for letter in "abd"},
}


def measure(cell: Cell, scale: Scale) -> Result:
    """Update by each trainer in turns."""
    if scale == TOY:
        cell = cell._replace(model="toy", workload=sequences(256) if cell.published else cell.workload)
        cell = cell._replace(rows=max(2 * cell.workload.group, min(cell.rows, 16)))
    budget = cell.workload.longest + cell.workload.prompt if cell.published else gpu_experiments.PLANNED
    args = argparse.Namespace(model=cell.model, device=scale.device, rows=cell.rows, budget=budget)
    found: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        made = {}
        for name in cell.by:
            kind, compiled = TRAINERS[name]
            made[name] = trainer_for(kind, cell.workload, args, folder, cell.adapter, compiled)
        seconds: dict[str, list[float]] = {name: [] for name in made}
        peaks: dict[str, float] = {}
        for place in range(1 + ROUNDS):
            for name in [*made][place % len(made) :] + [*made][: place % len(made)]:
                if name not in found:
                    try:
                        taken, peaks[name], _ = update(made[name], cell.rows)
                    except torch.OutOfMemoryError:
                        found[name] = {"out of memory": True}
                        continue
                    seconds[name].append(taken)
                    made[name].model.zero_grad(set_to_none=True)
        tokens, operations = needed(made[cell.by[0]].model, cell)
        for name in made:
            if name not in found:
                first, *counted = seconds[name]
                median = statistics.median(counted)
                numbers = {"seconds": counted, "first_s": first, "tokens/s": tokens / median}
                found[name] = numbers | {"gib above weights": peaks[name], **utilization(operations / median)}
    return found | planned(cell, scale) | published(cell)


def needed(model: Any, cell: Cell) -> tuple[int, float]:
    """Return the tokens of an update, and the operations that it needs; see the module."""
    fixed, _ = rollout(cell.workload, cell.rows)
    lengths = [(len(p), len(c)) for p, c in zip(fixed["prompt_ids"], fixed["completion_ids"], strict=True)]
    prompts = [prompt for prompt, _ in lengths[:: cell.workload.group]]
    tokens = sum(prompts) + sum(completion for _, completion in lengths)
    pairs = sum(prompt**2 / 2 for prompt in prompts) + sum(c * (prompt + c / 2) for prompt, c in lengths)
    products = {
        module.weight.data_ptr(): module.weight.numel()
        for name, module in model.named_modules()
        if name.endswith(("_proj", "lm_head", "base_layer")) and hasattr(module, "weight")
    }
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * head * pairs
    return tokens, (4 if cell.adapter else 6) * sum(products.values()) * tokens + 3 * attention


def profile() -> str | None:
    """Return the profile of this machine's GPU; None where the table does not have it."""
    gpu = local_gpu(False)
    name = gpus.resembled(gpu) if gpu else None
    return name if gpu and name and gpus.is_same(gpu, gpus.table()[name]) else None


def utilization(operations: float) -> Result:
    """Return operations per second, as a fraction of the maker's figure, too."""
    name = profile()
    return {"tflops": operations / 1e12} | ({"mfu": operations / 1e12 / gpus.table()[name]["tflops"]} if name else {})


def planned(cell: Cell, scale: Scale) -> Result:
    """Return the plan's GiB and seconds for a cell of two sequences."""
    if not cell.published or scale == TOY:
        return {}
    tokens = cell.workload.longest + PROMPT
    settings = {"batch": 1, "accumulation": 2, "length": tokens, "checkpointing": True, "loss": "this trainer"}
    settings |= {"prompt": PROMPT, "completion": tokens - PROMPT} | ({"rank": 16} if cell.adapter else {})
    shape = shape_of(json.loads(FILE.read_text())["models"][cell.published.split("-1-")[1].rsplit("-", 3)[0]])
    name = profile()
    seconds = {"planned_s": estimated_seconds(shape, {"settings": settings, "gpu": name})} if name else {}
    return {"planned_gib": planned_gib(shape, settings)} | seconds


def published(cell: Cell) -> Result:
    """Return prime-rl's GiB and seconds for a cell."""
    content = json.loads(FILE.read_text())
    rows = [row for section in ("complete", "time") for row in content[section] if row["id"] == cell.published]
    names = {"claimed_gib": "prime-rl gib, reserved", "published_s": "prime-rl s"}
    return {names[key]: row[key] for row in rows for key in names if key in row}


WAYS = ("recorded", "not recorded", "generate")


@contextmanager
def way(name: str) -> Iterator[None]:
    """While inside, our trainer records steps, or does not."""
    devices = () if name == "not recorded" else continuous_batching.RECORDING
    with replaced(continuous_batching, "RECORDING", devices):
        yield


def tokens_of(model: str, count: int, scale: Scale) -> Result:
    """Complete prompts of 128 tokens by each way; return milliseconds per token and tokens per second."""
    scale = Scale("toy", 8, 8) if scale == TOY else Scale(model, completion=256, completions=count)
    prompts = [f"{'How many ? ' * 30}{row // 8 + 1}" for row in range(scale.completions)]
    found: Result = {}
    for name in WAYS:
        kind = GRPOTrainer if name == "generate" else ExactGRPOTrainer
        options = generating(scale, trainer_class=kind, peft_config=LORA, bf16=scale.device == "cuda")
        options["generation_kwargs"] = {}  # a smallest length would keep steps from being recorded
        with tempfile.TemporaryDirectory() as folder, way(name) if kind is ExactGRPOTrainer else nullcontext():
            made = trainer(scale, folder, torch.bfloat16, **options)
            made.model.eval()
            seconds, lengths = [], []
            for _ in range(1 + ROUNDS):
                started = time.perf_counter()
                with torch.no_grad():
                    completions = made._generate(list(prompts))[1]
                seconds.append(time.perf_counter() - started)
                lengths.append((max(map(len, completions)), sum(map(len, completions))))
        rates = [taken / longest for taken, (longest, _) in zip(seconds[1:], lengths[1:], strict=True)]
        speeds = [tokens / taken for taken, (_, tokens) in zip(seconds[1:], lengths[1:], strict=True)]
        found[name] = {"ms per token": 1e3 * statistics.median(rates), "tokens/s": statistics.median(speeds)}
        found[name] |= {"first_s": seconds[0]}
        if scale.device == "cuda":
            found[name] |= {"gib": torch.cuda.max_memory_allocated() / GB}
            torch.cuda.reset_peak_memory_stats()
        if name == "recorded":
            found[name] |= {"why not": made.rollouts.completer.batching._trials.get(continuous_batching.UNRECORDED)}
        del made
    return found


GENERATIONS = {
    f"generation, {model}, {count}": partial(tokens_of, model, count)
    for model, count in (
        *(("smollm2_135m", 32), ("qwen2_5_1_5b", 64), ("qwen3_5_0_8b", 32), ("gemma3_1b", 32)),  # states, windows
        *(("qwen2_5_1_5b", 32), ("smollm2_135m", 64)),
    )
}
MEASURED: dict[str, Callable[[Scale], Result]] = {name: partial(measure, cell) for name, cell in CELLS.items()}
FIRST = ("Qwen3-4B LoRA, 16k", "generation, smollm2_135m, 32", "Qwen3-0.6B full, 16k", "Qwen3-0.6B LoRA, 16k")
BEHIND = ("vllm awake", "vllm asleep", "OOM retries")
EXPERIMENTS: dict[str, Callable[[Scale], Result]] = {
    **{name: (MEASURED | GENERATIONS)[name] for name in FIRST},
    **MEASURED,
    **GENERATIONS,
    **{name: gpu_experiments.EXPERIMENTS[name] for name in BEHIND},
}
"""By name, in the order in which they are worth the time."""
