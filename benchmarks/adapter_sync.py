"""A policy with LoRA on its way to vLLM: merged by TRL, merged by ours, as an adapter, with weights that exist once.

`python -m benchmarks.adapter_sync` takes nine minutes on two quiet cores and writes `benchmarks/adapter_sync.json`.
The policy is SmolLM2-135M with an adapter of rank 32 that has learned something, the engine a colocated one; each case
is a process of its own. Between two transfers the adapter takes steps of Adam's size at a learning rate of 1e-5.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from datetime import date
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks.generation import PROMPT, smollm2
from grpo.config.schema import ROOT, Model
from grpo.generation.adapter import adapter_weights
from grpo.generation.merged_weights import merged_copy, merged_weights
from grpo.generation.vllm_engine import PolicyEngine
from grpo.model.policy import without_weights
from grpo.planning.from_config import shipped_models
from grpo.planning.memory import adapter_parameters
from grpo.planning.workload import Adapter
from grpo.rundir.versions import versions
from grpo.utils.limits import GB

COMPLETIONS, LENGTH = 16, 32
"""Completions of which the speed is taken, and their tokens."""
COMPARED = 4
"""Completions of which log-probabilities are compared."""
STEPS = (1, 10, 200)
"""Steps after which engine and policy are compared."""
STEP = 1e-5
TIMED = 5
"""Transfers of which the mean time is taken."""
RANK = 32


class StockEngine(PolicyEngine):
    """Merges as TRL does, into the policy and out of it again."""

    _iter_named_params = VLLMGeneration._iter_named_params


KINDS: dict[str, tuple[type[PolicyEngine], dict[str, Any]]] = {
    "merged by TRL": (StockEngine, {"lora": "merged"}),
    "merged": (PolicyEngine, {"lora": "merged"}),
    "adapter": (PolicyEngine, {"lora": "adapter"}),
    "adapter, weights once": (PolicyEngine, {"lora": "adapter", "shares": True}),
}


def policy(dtype: torch.dtype, empty: bool) -> Any:
    """Return the policy, with an adapter of a hundredth of the size of the weights.

    Args:
        empty: whether its frozen weights are to come from the engine.
    """
    torch.manual_seed(0)
    name = str(dtype).removeprefix("torch.")
    group = OmegaConf.structured(Model(model_name_or_path=smollm2(), dtype=name))
    model = without_weights(group) if empty else AutoModelForCausalLM.from_pretrained(smollm2(), dtype=dtype)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=1e-3)
    return model.eval()


def take_steps(model: Any, count: int, generator: torch.Generator) -> None:
    """Change every number of the adapter by the learning rate, up or down, as Adam does."""
    for _ in range(count):
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.data += STEP * torch.randn(weight.shape, generator=generator).sign()


@torch.no_grad()
def scored(model: Any, prompt: list[int], completions: list[list[int]]) -> torch.Tensor:
    """Return the log-probability of each token of all completions."""
    logps = []
    for ids in completions:
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        logps.append(logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)])
    return torch.cat(logps)


def mismatch(engine: PolicyEngine, model: Any, prompt: list[int]) -> float:
    """Return the mean absolute difference of the engine's log-probabilities and the policy's, nats per token."""
    _, completions, logps, _ = engine.generate([prompt] * COMPARED, None, 1)
    theirs = torch.tensor([first for row in logps for first, *_ in row])
    return float((scored(model, prompt, completions) - theirs).abs().mean())


def sent(engine: PolicyEngine, model: Any) -> dict[str, torch.Tensor]:
    """Return copies of what a transfer sends, in the type that the engine holds it in."""
    if engine.sends_adapter:
        found = adapter_weights(model, engine._dist.gather_params)
        return {name: weight.to(next(model.base_model.parameters()).dtype) for name, weight in found.items()}
    return {name: weight.clone() for name, weight in merged_weights(model)}


@torch.no_grad()
def lost_in_a_step(engine: PolicyEngine, model: Any, generator: torch.Generator) -> float:
    """Return the error of what a step changes in the engine's products with weights, relative to the change.

    Without rounding it is the change of scale x B x A of each layer in float32 (2106.09685).
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def product(layer: Any, dtype: torch.dtype) -> torch.Tensor:
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        return layer.scaling["default"] * up.to(dtype).float() @ down.to(dtype).float()

    def of_engine(layer: Any) -> torch.Tensor:
        base = layer.get_base_layer()
        return (
            product(layer, base.weight.dtype) if engine.sends_adapter else merged_copy(base, [layer])["weight"].float()
        )

    before = [(of_engine(layer), product(layer, torch.float32)) for layer in layers]
    take_steps(model, 1, generator)
    error = size = 0.0
    for layer, (engines, exact) in zip(layers, before, strict=True):
        change = product(layer, torch.float32) - exact
        error += float((of_engine(layer) - engines - change).pow(2).sum())
        size += float(change.pow(2).sum())
    return (error / size) ** 0.5


def resident() -> float:
    """Return the resident memory of this process, bytes, after what is not used has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return float(psutil.Process().memory_info().rss)


def measure(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """Transfer a policy to an engine, and return time, bytes, differences, memory and speed."""
    engine_class, options = KINDS[kind]
    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    prompt, generator = tokenizer(PROMPT)["input_ids"], torch.Generator().manual_seed(0)
    import vllm  # noqa: F401  whose memory is not the weights'

    at_first = resident()
    model = policy(dtype, bool(options.get("shares")))
    base = sum(weight.nbytes for name, weight in model.named_parameters() if "lora_" not in name)
    room: dict[str, Any] = {"max_model_length": 128, "max_num_seqs": COMPLETIONS, "max_completion_length": LENGTH}
    engine = engine_class(model, Accelerator(), tokenizer, gpu_memory_utilization=0.1, **room, **options)
    engine.sync_weights()
    mismatch(engine, model, prompt)  # weights that nothing has used yet may still be on disk
    in_memory = resident() - at_first
    weights = {name: weight.clone() for name, weight in model.named_parameters() if "lora_" not in name}
    differences, done = {}, 0
    for steps in STEPS:
        take_steps(model, steps - done, generator)
        engine.sync_weights()
        differences[str(steps)], done = mismatch(engine, model, prompt), steps
    started = time.perf_counter()
    for _ in range(TIMED):
        engine.sync_weights()
    seconds = (time.perf_counter() - started) / TIMED
    now = dict(model.named_parameters())
    changed = sum(int((now[name] != weight).sum()) for name, weight in weights.items())
    engine.generation_kwargs = {"min_tokens": LENGTH}
    started = time.perf_counter()
    engine.generate([prompt] * COMPLETIONS, None, 1)
    rate = COMPLETIONS * LENGTH / (time.perf_counter() - started)
    return {
        "transfer_seconds": seconds,
        "transfer_bytes": sum(weight.nbytes for weight in sent(engine, model).values()),
        "mismatch_nats": differences,
        "lost_in_a_step": lost_in_a_step(engine, model, generator),
        "base_numbers_changed": changed / sum(weight.numel() for weight in weights.values()),
        "resident_gb": in_memory / GB,
        "base_gb": base / GB,
        "tokens_per_second": rate,
    }


def by_shape(name: str) -> dict[str, float]:
    """Return the bytes of a transfer of a model of `conf/model` in bfloat16, merged and as an adapter of rank 16."""
    shape = shipped_models()[name][1]
    merged, adapter = 2.0 * shape.parameters(), 2.0 * adapter_parameters(shape, Adapter(16))
    return {"merged_bytes": merged, "adapter_bytes": adapter, "ratio": merged / adapter}


def main() -> None:
    """Run all cases, or one; print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # for the processes of the cases
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], getattr(torch, options.case[1]))))
        return
    console, results = Console(), dict[str, dict[str, Any]]()
    for dtype in track(("float32", "bfloat16"), "comparing", console=console):
        for kind in KINDS:
            command = [sys.executable, "-m", "benchmarks.adapter_sync", "--case", kind, dtype]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-2000:])
            results[f"{dtype}, {kind}"] = json.loads(done.stdout.splitlines()[-1])
            console.print(f"{dtype}, {kind}", results[f"{dtype}, {kind}"])
    table = Table("", "seconds", "MB", *(f"{steps} steps" for steps in STEPS), "lost in a step", "GiB", "tokens/s")
    for name, row in results.items():
        numbers = [f"{row['transfer_seconds']:.3f}", f"{row['transfer_bytes'] / 1e6:.1f}"]
        numbers += [f"{value:.2g}" for value in row["mismatch_nats"].values()]
        numbers += [f"{row['lost_in_a_step']:.1%}", f"{row['resident_gb']:.2f}", f"{row['tokens_per_second']:.0f}"]
        table.add_row(name, *numbers)
    console.print(table)
    shapes = {name: by_shape(name) for name in ("qwen2_5_3b", "qwen2_5_7b")}
    console.print(shapes)
    content = {"date": str(date.today()), "versions": versions(), "smollm2_135m": results, "by_shape": shapes}
    (ROOT / "benchmarks" / "adapter_sync.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
