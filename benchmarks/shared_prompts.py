"""What sharing prompts saves in an update, and what an update costs beyond a plain pass over its tokens.

`python -m benchmarks.shared_prompts` takes a quarter of an hour on two cores, prints and writes
`benchmarks/shared_prompts.json`: random policies in float32, with the shape of SmolLM2-135M and a part of the layers of
Qwen2.5-VL-3B. Without sharing, the update is the one of before: prompts with images, and long completions, were not
shared.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging
from trl import GRPOTrainer

from benchmarks.peak import read_peak
from benchmarks.update import build_policy, rollout, update
from grpo.config.options import Update
from grpo.config.schema import ROOT
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import make, relative_difference
from tests.vision_policies import make_processor

GROUP = 8
SIDE = (840, 560)
"""Pixels of an image of 600 tokens, of 28 x 28 pixels each."""


def trainer_of(kind: str, folder: str, rows: int, longest: int, budget: int, **options: Any) -> GRPOTrainer:
    """Return a trainer on fixed rollouts: TRL's, or ours with prompts `shared` or each completion `alone`."""
    extra = (
        {} if kind == "trl" else {"update": Update(max_tokens_per_microbatch=budget, share_prompts=kind == "shared")}
    )
    trainer = make(
        GRPOTrainer if kind == "trl" else ExactGRPOTrainer,
        Path(folder),
        per_device_train_batch_size=GROUP,
        gradient_accumulation_steps=rows // GROUP,
        num_generations=GROUP,
        max_completion_length=longest,
        bf16=False,
        reward_funcs=lambda completion_ids, **kwargs: [row % GROUP / GROUP for row in range(len(completion_ids))],
        **options,
        **extra,
    )
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = rows // GROUP
    return trainer


def compare(kinds: list[str], name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds, peak of host memory and difference of the gradients of updates by each kind.

    The kinds take turns, each time in a process of their own: a machine may become slower in the meantime.
    """
    found: dict[str, Any] = {}
    gradients = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds * args.repeats:
            command = [sys.executable, "-m", "benchmarks.shared_prompts", "--parts", name, "--kind", kind]
            command += ["--layers", str(args.layers), "--into", f"{folder}/{kind}.pt"]
            subprocess.run(command, check=True)
            result, gradients[kind] = torch.load(f"{folder}/{kind}.pt")
            earlier = found.get(kind, {"seconds": []})["seconds"]
            found[kind] = result | {"seconds": [*earlier, result["seconds"]]}
            print(kind, found[kind], flush=True)
    last = kinds[-1]
    found["gradient_difference"] = {kind: relative_difference(gradients[last], gradients[kind]) for kind in kinds[:-1]}
    found["faster"] = {kind: round(min(found[kind]["seconds"]) / min(found[last]["seconds"]), 2) for kind in kinds[:-1]}
    return found


def measure(trainer: GRPOTrainer, args: argparse.Namespace, inputs: list[dict[str, Any]] | None = None) -> None:
    """Write seconds, peak memory, metrics and gradient of an update into a file."""
    seconds, _, gradients = update(trainer, "", GROUP, inputs)
    peak = read_peak()
    if isinstance(trainer, ExactGRPOTrainer):  # which resets the peak itself
        peak = max(peak, trainer.memory.highest["memory/update_gb"])
    found = {"seconds": round(seconds, 2), "peak_gib": round(peak, 2)}
    metrics = trainer._metrics["train"]
    names = ("update/microbatches", "update/padded_tokens")
    torch.save((found | {name: metrics[name][-1] for name in names if name in metrics}, gradients), args.into)


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """An update of 64 completions, against a forward and backward pass by transformers alone over as many tokens."""
    fixed, _ = rollout("b", 64)
    with tempfile.TemporaryDirectory() as folder:
        options = {"model": build_policy("smollm2_135m", "cpu"), "rollout_func": lambda prompts, trainer: fixed}
        trainer = trainer_of("shared", folder, 64, 256, 1024, **options)
        update(trainer, "b", 64)
        tokens = int(trainer._metrics["train"]["update/padded_tokens"][-1])
        ids = torch.randint(3, 80, (-(-tokens // 128), 128))
        ours, theirs = [], []
        for _ in range(args.repeats):
            ours.append(update(trainer, "b", 64)[0])
            trainer.model.zero_grad()
            started = time.perf_counter()
            for some in ids.split(8):
                trainer.model(input_ids=some, labels=some, use_cache=False).loss.backward()
            theirs.append(time.perf_counter() - started)
            print("update", ours[-1], "plain pass", theirs[-1], flush=True)
    return {
        "tokens": tokens,
        "update_seconds": [round(value, 2) for value in ours],
        "plain_seconds": [round(value, 2) for value in theirs],
        "ratio": round(min(ours) / min(theirs), 3),
    }


def long(args: argparse.Namespace) -> dict[str, Any]:
    """Completions of 2,048 tokens behind a prompt of 512, in one micro-batch."""
    if not args.kind:
        return {"layers": args.layers} | compare(["alone", "shared"], "long", args)
    ids = torch.randint(3, 80, (GROUP, 512 + 2048), generator=torch.Generator().manual_seed(1))
    rows = {"prompt_ids": [ids[0, :512].tolist()] * GROUP, "completion_ids": ids[:, 512:].tolist(), "logprobs": None}

    model = build_policy("smollm2_135m", "cpu")
    del model.model.layers[args.layers :]
    options = {"model": model, "rollout_func": lambda prompts, trainer: rows}
    with tempfile.TemporaryDirectory() as folder:
        measure(trainer_of(args.kind, folder, GROUP, 2048, 20_480, **options), args)
    return {}


def images(args: argparse.Namespace) -> dict[str, Any]:
    """An image of 600 tokens, and eight completions of 100; layers and vocabulary are an eighteenth of the model's."""
    if not args.kind:
        return compare(["trl", "alone", "shared"], "images", args)
    processor = make_processor("qwen2_5_vl")
    processor.image_processor.patch_size = 14
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": SIDE[0] * SIDE[1]}
    picture = Picture.fromarray(np.random.default_rng(0).integers(0, 255, (*SIDE[::-1], 3), dtype=np.uint8))
    prompt = List({"role": Value("string"), "content": Value("string")})
    data = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "How many ?"}], "images": [picture]}] * GROUP,
        features=Features({"prompt": prompt, "images": List(Image())}),
    )
    completions = torch.randint(3, 80, (GROUP, 100), generator=torch.Generator().manual_seed(1)).tolist()

    def fixed(prompts: list, trainer: Any) -> dict[str, Any]:
        ids = trainer._tokenize_prompts(prompts)[0]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    options = {"model": qwen(processor), "processing_class": processor, "train_dataset": data, "rollout_func": fixed}
    with tempfile.TemporaryDirectory() as folder:
        measure(trainer_of(args.kind, folder, GROUP, 100, 6000, **options), args, list(data))
    return {}


def qwen(processor: Any) -> Any:
    """Return a random policy of Qwen2.5-VL-3B's widths, of two layers each in the tower and in the language model."""
    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    ids = dict(zip(names, processor.tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names]), strict=True))
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        vision_config={"depth": 2, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        | {"out_hidden_size": 2048, "fullatt_block_indexes": [1]},
        text_config={"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 2, "vocab_size": 8448}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}},
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


PARTS = {"plain": plain, "long": long, "images": images}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--repeats", type=int, default=2, help="updates by each")
    parser.add_argument("--layers", type=int, default=10, help="of SmolLM2's 30, for long completions")
    parser.add_argument("--kind", help="of a trainer: the only one to measure")
    parser.add_argument("--into", help="a file for the results of this one")
    args = parser.parse_args()
    logging.set_verbosity_error()
    if args.kind:
        PARTS[args.parts[0]](args)
        return
    file = ROOT / "benchmarks" / "shared_prompts.json"
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    for name in args.parts:
        results[name] = {"what": PARTS[name].__doc__} | PARTS[name](args)
        versions = {name: version(name) for name in ("torch", "trl", "transformers")}
        content = {"date": str(date.today()), "cpu_cores": os.cpu_count(), "versions": versions, "results": results}
        file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
