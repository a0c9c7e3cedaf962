"""Drift of the weights that LoRA does not train over 200 weight transfers to vLLM: by stock TRL, and by ours.

`python -m benchmarks.adapter_sync` takes three minutes and writes `benchmarks/adapter_sync.json`. The policy is
SmolLM2-135M in bfloat16 with an adapter of rank 32 that has learned something, the engine a colocated one.
"""

import json
from datetime import date
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation.vllm_generation import VLLMGeneration

from benchmarks.generation import PROMPT, smollm2
from grpo.config.schema import ROOT
from grpo.generation.vllm_engine import PolicyEngine
from grpo.runs.versions import versions

SYNCS = 200
COMPLETIONS = 32
STEP = 1e-4  # change of each number of the adapter between two transfers, as in training


class StockEngine(PolicyEngine):
    """Merges as TRL does, into the policy and out of it again."""

    _iter_named_params = VLLMGeneration._iter_named_params


def policy() -> Any:
    """Return the policy, with an adapter of a hundredth of the size of the weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=1e-3)
    return model.eval()


@torch.no_grad()
def scored(model: Any, prompt: list[int], completions: list[list[int]]) -> list[torch.Tensor]:
    """Return the log-probability of each token of each completion."""
    logps = []
    for ids in completions:
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        logps.append(logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)])
    return logps


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the mean absolute difference per token, in nats."""
    return float((torch.cat(one) - torch.cat(other)).abs().mean())


def measure(engine_class: type[PolicyEngine]) -> dict[str, Any]:
    """Transfer the weights many times, and return the drift of policy and engine."""
    model, tokenizer = policy(), AutoTokenizer.from_pretrained(smollm2())
    base = {name: weight.clone() for name, weight in model.named_parameters() if "lora_" not in name}
    prompt = tokenizer(PROMPT)["input_ids"]
    room: dict[str, Any] = {"max_model_length": 128, "max_num_seqs": COMPLETIONS, "max_completion_length": 64}
    engine = engine_class(model, Accelerator(), tokenizer, gpu_memory_utilization=0.1, **room)

    def mismatch() -> tuple[float, list[list[int]]]:
        _, completions, logps, _ = engine.generate([prompt] * COMPLETIONS, None, 1)
        theirs = [torch.tensor([first for first, *_ in row]) for row in logps]
        return distance(scored(model, prompt, completions), theirs), completions

    engine.sync_weights()
    first, _ = mismatch()
    trained = [weight for name, weight in model.named_parameters() if "lora_" in name]
    generator = torch.Generator().manual_seed(0)
    for _ in range(SYNCS - 1):
        for weight in trained:
            weight.data += STEP * torch.randn(weight.shape, generator=generator)
        engine.sync_weights()
    last, completions = mismatch()
    now = dict(model.named_parameters())
    changed = sum(int((now[name] != weight).sum()) for name, weight in base.items())
    moved = sum(float((now[name].float() - weight.float()).pow(2).sum()) for name, weight in base.items())
    size = sum(float(weight.float().pow(2).sum()) for weight in base.values())
    after = scored(model, prompt, completions)
    for name, weight in base.items():
        now[name].data.copy_(weight)
    return {
        "base_weights_changed": changed / sum(weight.numel() for weight in base.values()),
        "relative_change": (moved / size) ** 0.5,
        "policy_moved_nats": distance(after, scored(model, prompt, completions)),
        "mismatch_first_nats": first,
        "mismatch_last_nats": last,
    }


def main() -> None:
    """Run, print and write."""
    results = {"trl": measure(StockEngine), "ours": measure(PolicyEngine)}
    table = Table(f"after {SYNCS} transfers", "stock TRL", "ours")
    for name in results["ours"]:
        table.add_row(name.replace("_", " "), *(f"{results[side][name]:.3g}" for side in ("trl", "ours")))
    Console().print(table)
    result = {"date": str(date.today()), "versions": versions(), "transfers": SYNCS, **results}
    (ROOT / "benchmarks" / "adapter_sync.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
