"""Evaluate one model as configured: load it, or hand it to vLLM, let it answer, and report."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from grpo import policy
from grpo.console import output_in
from grpo.data import load_held_out
from grpo.errors import RunError
from grpo.evaluation.loop import Decoding, evaluate
from grpo.generation.offline import with_transformers, with_vllm
from grpo.generation.vllm_engine import BATCH
from grpo.runs.files import write_json
from grpo.runs.summary import share
from grpo.scoring import check_judge, judge_of, started
from rewards.isolation import RewardError


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
