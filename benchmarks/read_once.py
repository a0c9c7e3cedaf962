"""The generation phase of a step by stock TRL and by ours, with transformers, in turns: time and memory.

Both make completions of the same lengths: the first token of each is forced, and says when it ends. Text by a policy of
SmolLM2-135M's shape, images by one of SmolVLM-256M's, in float32, on a GPU in bfloat16. `python -m
benchmarks.read_once` prints a table and writes `benchmarks/read_once_cpu.json`, which takes half an hour on two cores,
or `read_once_cuda.json`.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForImageTextToText, Idefics3Processor, LogitsProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.utils import logging
from trl import GRPOTrainer

from benchmarks.peak import read_peak, reset_peak
from benchmarks.update import build_policy
from grpo.config.schema import ROOT
from grpo.rundir.versions import versions
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import make
from tests.vision_policies import TEMPLATE, tokenizer_with

GROUP, LONGEST = 8, 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, FIRST = 3, 100
"""The first token that ends nothing, and the first that says a length."""


@dataclass(frozen=True)
class Workload:
    """What is generated for."""

    description: str
    prompts: int
    words: int
    """Tokens of the longest prompt's text."""
    shortest: int = 0
    """Tokens of the shortest prompt; 0 for prompts of equal length."""
    model: str = "smollm2_135m"
    """Policy of text, as `benchmarks.update.build_policy` has it."""
    side: int = 0
    """Pixels of the image of each prompt; 0 for none."""


WORKLOADS = {
    "128": Workload("text of 128 tokens", 4, 128),
    "512": Workload("text of 512 tokens", 4, 512),
    "uneven": Workload("text of 128 to 512 tokens", 4, 512, shortest=128),
    "hybrid": Workload("text of 512 tokens, Qwen3.5's layers", 4, 512, model="hybrid"),
    "images": Workload("an image of 5 tiles, 320 tokens", 2, 16, side=1024),
}


class Lengths(LogitsProcessor):
    """Gives each completion its length: by its first token, which is forced."""

    def __init__(self, lengths: list[int], eos: int) -> None:
        self.lengths, self.eos = torch.tensor(lengths, device=DEVICE), eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -math.inf)
        if len(input_ids) == len(self.lengths) and not (input_ids >= FIRST).any():
            rows = torch.arange(len(scores), device=DEVICE)
            chosen[rows, FIRST + rows] = 0.0
            return chosen
        first = (input_ids >= FIRST).int().argmax(1)
        ends = input_ids.size(1) - first + 1 >= self.lengths[input_ids.gather(1, first[:, None])[:, 0] - FIRST]
        chosen[:, self.eos] = 0.0
        scores[:, :WORDS] = scores[:, FIRST:] = -math.inf
        return torch.where(ends[:, None], chosen, scores)


def lengths(count: int) -> list[int]:
    """Return log-normal lengths, 60 tokens on average and at most 256."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.8 + math.log(60) - 0.32
    return drawn.exp().round().clamp(2, LONGEST).int().tolist()


def smolvlm() -> tuple[Any, Any]:
    """Return a random policy of SmolVLM-256M's shape and a processor with the words of the built-in policy."""
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    names = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    tokenizer = tokenizer_with(*names, *cells)
    images = Idefics3ImageProcessorPil(size={"longest_edge": 1024}, max_image_size={"longest_edge": 512})
    processor = Idefics3Processor(images, tokenizer, 64, TEMPLATE.replace("IMAGE", "<image>"))
    text = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    text |= {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49280}
    tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    tower |= {"patch_size": 16, "image_size": 512}
    ids = {"image_token_id": processor.image_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model("idefics3", text_config=text, vision_config=tower, scale_factor=4, **ids)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    with torch.device(DEVICE):
        return AutoModelForImageTextToText.from_config(config, dtype=dtype), processor


def with_processor(generate: Callable[..., Any], processor: LogitsProcessor) -> Callable[..., Any]:
    """Return transformers' `generate` with a processor of logits where it is given none."""

    @wraps(generate)  # its module, too: our trainer calls others as they are
    def processed(*inputs: Any, **options: Any) -> Any:
        return generate(*inputs, **{"logits_processor": [processor]} | options)

    return processed


def problems(workload: Workload) -> list[dict[str, Any]]:
    """Return rows of the data, each prompt as often as it has completions."""
    random = np.random.default_rng(0)
    rows = []
    for words in np.linspace(workload.shortest or workload.words, workload.words, workload.prompts, dtype=int):
        row: dict[str, Any] = {"prompt": " ".join(map(str, random.integers(0, 10, words)))}
        if workload.side:
            pixels = random.integers(0, 255, (workload.side, workload.side, 3), dtype=np.uint8)
            parts = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": row["prompt"]}]
            row = {"prompt": [{"role": "user", "content": parts}]}
        rows += [row] * GROUP
    return rows


def measure(workload: Workload, repeats: int) -> dict[str, Any]:
    """Generate by both in turns, after a short warm-up."""
    if workload.side:
        model, processor = smolvlm()
        given = {"model": model, "processing_class": processor}
    else:
        given = {"model": build_policy(workload.model, DEVICE)}
    rows, wanted = problems(workload), lengths(workload.prompts * GROUP)
    found: dict[str, list[tuple[float, float]]] = {"trl": [], "ours": []}
    given["model"].eval()
    generate = given["model"].generate
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            name: make(
                kind,
                Path(folder),
                rollout_func=None,
                train_dataset=Dataset.from_list(
                    [{"prompt": row["prompt"]} for row in rows[:1]] if not workload.side else [{"prompt": "?"}]
                ),
                per_device_train_batch_size=GROUP,
                num_generations=GROUP,
                max_completion_length=LONGEST,
                **given,
            )
            for name, kind in (("trl", GRPOTrainer), ("ours", ExactGRPOTrainer))
        }
        for turn in range(1 + repeats):
            for name in ("trl", "ours") if turn % 2 else ("ours", "trl"):
                trainer = trainers[name]
                short = [2] * len(wanted) if not turn else wanted
                lengths_of = Lengths(short, trainer._tokenizer.eos_token_id)
                given["model"].generate = with_processor(generate, lengths_of)
                before, started = reset_peak(), time.perf_counter()
                ours = name != "trl"
                generating = partial(trainer.rollouts.completer.generate, trainer) if ours else trainer._generate
                completions = generating([row["prompt"] for row in rows])[1]
                seconds, peak = time.perf_counter() - started, read_peak()
                if name == "ours":  # whose readings reset the peak
                    peak = max(peak, trainer.memory.highest.pop("memory/generate_gb", 0.0))
                assert [len(ids) for ids in completions] == short
                if turn:
                    found[name].append((seconds, peak - before))
    times, peaks = ({name: [round(run[place], 3) for run in runs] for name, runs in found.items()} for place in (0, 1))
    ratio = statistics.median(times["trl"]) / statistics.median(times["ours"])
    result = {"workload": workload.description, "prompts": workload.prompts, "completions": len(wanted)}
    return result | {
        "mean_length": sum(wanted) / len(wanted),
        "seconds": times,
        "ratio": round(ratio, 2),
        "peak_gb": peaks,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2, help="generations by each")
    args = parser.parse_args()
    logging.set_verbosity_error()
    table = Table("prompts", "completions", "TRL s", "ours s", "ratio", "TRL GiB", "ours GiB")
    file = ROOT / "benchmarks" / f"read_once_{DEVICE}.json"
    known = json.loads(file.read_text())["results"] if file.exists() else {}
    for name in args.workloads:
        known[name] = result = measure(WORKLOADS[name], args.repeats)
        medians = [
            f"{statistics.median(result[of][trainer]):.2f}"
            for of in ("seconds", "peak_gb")
            for trainer in ("trl", "ours")
        ]
        table.add_row(
            result["workload"], str(result["completions"]), *medians[:2], f"{result['ratio']:.2f}x", *medians[2:]
        )
        content = {
            "date": str(date.today()),
            "device": torch.cuda.get_device_name() if DEVICE == "cuda" else f"{os.cpu_count()} cores",
            "versions": versions(),
        }
        file.write_text(json.dumps(content | {"results": known}, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
