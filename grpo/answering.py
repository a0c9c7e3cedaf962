"""Evaluate one model as configured: load it, or hand it to vLLM, let it answer, and report."""

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from grpo import policy
from grpo.console import output_in
from grpo.data import load_held_out, prompt_lengths
from grpo.errors import RunError
from grpo.evaluation import Decoding, Generate, complete, evaluate
from grpo.runs.files import write_json
from grpo.runs.summary import share
from grpo.scoring import check_judge, judge_of, started
from grpo.vllm_engine import BATCH, cpu_options
from rewards.isolation import RewardError

VLLM_SHARE = {"cuda": 0.9, "cpu": 0.15}  # of the memory
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters, that it takes


def evaluate_model(config: DictConfig, output: Path) -> float:
    """Evaluate `evaluate.model`, print and save the result, and return its greedy accuracy."""
    console = Console(file=sys.stderr)
    if config.evaluate.model is None:
        policy.make_available(config.model)
    name = config.evaluate.model or config.model.model_name_or_path
    with output_in(output / "train.log"):
        result = _evaluated(name, config, output, console)
    write_json(output / "evaluation.json", result)
    show(result, output)
    return result["accuracy"]


def _evaluated(name: str, config: DictConfig, output: Path, console: Console) -> dict[str, Any]:
    asked, length = config.evaluate, config.train.max_completion_length
    problems, counts = load_held_out(config.task)
    vllm = find_spec("vllm") is not None and (torch.cuda.is_available() or config.train.use_vllm)
    with started(judge_of(config), problems.column_names, output) as judges:
        check_judge(judges[config.task.eval.reward])
        try:
            result = evaluate(
                generate=with_vllm(name, config, list(problems["prompt"])) if vllm else with_transformers(name, config),
                problems=problems,
                judge=judges[config.task.eval.reward],
                decoding=Decoding(length, asked.temperature, asked.samples, config.train.seed),
                file=output / "completions.jsonl",
                batch_size=BATCH if vllm else asked.batch_size,
                console=console,
                difficulty=config.task.eval.difficulty,
                policy=fingerprint(name),
            )
        except RewardError as error:
            raise RunError(f"failed: {error}") from error
    return result | {"model": name, "engine": "vllm" if vllm else "transformers", "data": counts}


def with_transformers(name: str, config: DictConfig) -> Generate:
    """Return a generator of completions by transformers."""
    quantization = policy.quantization_config(config.peft) if policy.adapter_config(name) else None
    model, tokenizer = policy.load(name, config.model, quantization=quantization)
    return partial(complete, model, tokenizer, config.train.max_completion_length)


def with_vllm(name: str, config: DictConfig, prompts: list[Any]) -> Generate:
    """Return a generator of completions by vLLM, with room for these prompts."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # it logs where everything else does
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one process, which nothing can outlive
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    length, on_gpu = config.train.max_completion_length, torch.cuda.is_available()
    adapter = policy.adapter_config(name)
    request = LoRARequest("adapter", 1, str(Path(name).absolute())) if adapter else None
    engine = LLM(
        model=adapter["base_model_name_or_path"] if adapter else name,
        tokenizer=name,
        dtype=config.model.dtype,
        enable_lora=bool(adapter),
        max_lora_rank=next(rank for rank in VLLM_RANKS if rank >= (adapter["r"] if adapter else 1)),
        **({"gpu_memory_utilization": VLLM_SHARE["cuda"]} if on_gpu else cpu_options(VLLM_SHARE["cpu"], weights=0)),
        max_model_len=max(prompt_lengths(prompts, AutoTokenizer.from_pretrained(name))) + length,
    )

    def generate(prompts: list[Any], temperature: float, seeds: list[int]) -> list[str]:
        how = [SamplingParams(temperature=temperature, max_tokens=length, seed=seed) for seed in seeds]
        ask = engine.generate if isinstance(prompts[0], str) else engine.chat
        return [answer.outputs[0].text for answer in ask(prompts, how, lora_request=request)]

    return generate


def fingerprint(name: str) -> str:
    """Return what tells a policy from others: its name, and when its weights were written if it is a folder."""
    return " ".join([name, *(str(file.stat().st_mtime_ns) for file in sorted(Path(name).glob("*.safetensors")))])


def show(result: dict[str, Any], output: Path) -> None:
    """Print the result as a table."""
    table = Table(title=f"{result['model']} by {result['engine']}", show_header=False, title_justify="left")
    table.add_row("greedy", share(result["accuracy"], result["interval"]) + f"  {result['samples']} problems")
    for value, part in result.get("by_difficulty", {}).items():
        table.add_row(
            f"  difficulty {value}", share(part["accuracy"], part["interval"]) + f"  {part['samples']} problems"
        )
    for name in ("pass@k", "maj@k"):
        for k, found in result.get(name, {}).items():
            table.add_row(name.replace("k", k), share(found["value"], found["interval"]))
    for kind, count in result.get("judge_errors", {}).items():
        table.add_row("not judged", f"[red]{count} completions: {kind}[/]")
    table.add_row("in", os.path.relpath(output))
    Console().print(table)
