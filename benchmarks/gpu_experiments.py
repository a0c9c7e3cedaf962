"""What `python -m benchmarks.gpu` runs, each in a process of its own; `tests/gpu` holds the results to their limits.

Every experiment takes a scale: on a GPU the shape of Qwen2.5-0.5B, at `toy` size a model of 100,000 parameters that
also runs without a GPU. Weights and rollouts are random, and nothing is downloaded.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from hydra import initialize_config_dir
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import GRPOTrainer

from benchmarks import exactness as kinds
from benchmarks import memory, update
from benchmarks.update import build_policy
from grpo.config.schema import ROOT, register
from grpo.options import Update
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout import per_token
from grpo.utils.limits import GB
from grpo.utils.patching import replaced
from tests.stock_trl import Record, make, relative_difference, rollouts, train

LORA = LoraConfig(r=16, target_modules="all-linear")
CASES = ("grpo", "dapo", "bnpo, entropy bonus, 4 slices", "KL", "sequence level", "LoRA, KL, checkpointing")
"""Cases of benchmarks.exactness that are compared on a GPU."""
PLANNED = 16384
"""Tokens of a micro-batch that a plan for 80 GB chooses; a smaller GPU runs out of memory once and halves it."""
Result = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of the experiments."""

    model: str
    """A choice of `conf/model`, or `toy`."""
    completion: int
    """Tokens of the longest completion."""
    completions: int
    """Completions per step."""

    @property
    def device(self) -> str:
        """`cuda` where there is a GPU."""
        return "cuda" if torch.cuda.is_available() else "cpu"


REAL = Scale("qwen2_5_0_5b", completion=256, completions=64)
TOY = Scale("toy", completion=24, completions=16)


def trainer(scale: Scale, folder: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return our trainer of a random policy; `options` as in `tests.stock_trl.make`, and `trainer_class`."""
    kind = options.pop("trainer_class", ExactGRPOTrainer)
    if "model" not in options:
        options["model"] = build_policy(scale.model, scale.device, dtype)
    words = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
    defaults: dict[str, Any] = {
        "processing_class": words,
        "train_dataset": Dataset.from_dict({"prompt": ["How many ? " * 16 + f"{number}" for number in range(256)]}),
        "per_device_train_batch_size": scale.completions,
        "num_generations": 8,
        "max_completion_length": scale.completion,
        "rollout_func": lambda prompts, trainer: rollouts(prompts, trainer, lambda generator: scale.completion),
        "reward_funcs": lambda prompts, **kwargs: [float(place % 8) for place, _ in enumerate(prompts)],
    }
    return make(kind, Path(folder), **defaults | options)


def generating(scale: Scale, **options: Any) -> Result:
    """Return options of `trainer` for completions of full length that the policy generates itself."""
    return {"rollout_func": None, "generation_kwargs": {"min_new_tokens": scale.completion}, **options}


def exactness(scale: Scale) -> Result:
    """Compare the gradient with stock TRL's in float32, and how far both are from it in bfloat16."""
    found = {name: max(kinds.compare(kinds.CASES[name]).gradients) for name in CASES}
    gradients = {}
    args = argparse.Namespace(model=scale.model, rows=scale.completions, device=scale.device, budget="auto")
    kernels = {"float32 trl": GRPOTrainer, "bfloat16 trl": GRPOTrainer, "bfloat16 ours": ExactGRPOTrainer}
    for name, kind in kernels.items():
        dtype = torch.float32 if name.startswith("float32") else torch.bfloat16
        with tempfile.TemporaryDirectory() as folder:
            made = update.trainer_for(kind, update.WORKLOADS["b"], args, folder)
            made.model.to(torch.bfloat16).to(dtype)  # the same weights in both types
            _, _, gradient = update.update(made, scale.completions)
            gradients[name] = {key: value.float().cpu() for key, value in gradient.items()}
        del made
    exact = gradients.pop("float32 trl")
    error = {name: relative_difference(gradient, exact) for name, gradient in gradients.items()}
    return {"float32 against TRL": found, "error in bfloat16": error}


def auto(scale: Scale) -> Result:
    """Let `auto` grow over six steps; return its tokens and the memory of each step."""
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(scale, folder, torch.bfloat16, update=Update("auto"), max_steps=6, peft_config=LORA)
        logs = train(made).logs
    names = ("update/max_tokens_per_microbatch", "memory/update_gb", "update/oom_retries")
    total = torch.cuda.get_device_properties().total_memory / GB if scale.device == "cuda" else None
    return {"total_gb": total, **{name: [row[name] for row in logs] for name in names}}


PHASES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "generate": lambda made: (made, "_generate"),
    "logprobs": lambda made: (per_token, "score_all"),
    "update": lambda made: (made.step_update, "gradient"),
}
"""Where the function of each phase that survives an OOM is found."""


def out_of_memory(scale: Scale) -> Result:
    """Run out of memory in each phase, and compare completions and weights with those of a run that did not."""
    scale = replace(scale, completion=scale.completion // 2)
    one_microbatch = Update(scale.completions * (scale.completion + 128))
    # an adapter, as memory that stays, such as gradients and optimizer state, does not shrink with the micro-batch
    common = {"num_iterations": 2, "max_steps": 2, "update": one_microbatch, "peft_config": LORA}
    greedy = generating(scale, top_k=1)  # the same completions in whatever batches they are generated
    found = {}
    for phase, where in PHASES.items():
        options = common | (greedy if phase == "generate" else {})
        with tempfile.TemporaryDirectory() as folder:
            free = trainer(scale, folder, **options)
            clear_device_cache(garbage_collection=True)  # of the trainer before, too
            before = torch.cuda.memory_allocated() if scale.device == "cuda" else 0
            start = trained(free)
            train(free)
            room = 0.6 * (free.memory.highest[f"memory/{phase}_gb"] * GB - before)
            weights = trained(free)
            completions, tried = list(free._logs["completion"]), free.rollouts.completer.batching
            del free
            made = trainer(scale, folder, **options)
            made.packing.shared_prompts.decide()  # the trials of a policy are no part of a phase
            made.rollouts.completer.batching = tried
            owner, method = where(made)
            inner = getattr(owner, method)

            def short(*args: Any, inner: Any = inner, made: Any = made, room: float = room, **kwargs: Any) -> Any:
                with little_memory(made, room):
                    return inner(*args, **kwargs)

            with replaced(owner, method, short):
                record = train(made)
        found[phase] = {
            "retries": sum(row["update/oom_retries"] for row in record.logs),
            "same_completions": list(made._logs["completion"]) == completions,
            "weights": relative_difference(trained(made), weights),
            "moved": relative_difference(weights, start),
        }
        del made
    return found


def trained(made: Any) -> dict[str, torch.Tensor]:
    """Return copies of the weights that are trained, in CPU memory."""
    return {
        name: weight.detach().cpu().clone() for name, weight in made.model.named_parameters() if weight.requires_grad
    }


@contextlib.contextmanager
def little_memory(made: Any, room: float) -> Iterator[None]:
    """While inside, so many bytes of the GPU are free; on a CPU the first forward pass raises as a GPU does."""
    if torch.cuda.is_available():
        clear_device_cache(garbage_collection=True)
        limit = torch.cuda.memory_reserved() + room  # in use are also the workspaces of libraries
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties().total_memory)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return

    def fail(*args: Any) -> None:
        hook.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = made.model.get_input_embeddings().register_forward_pre_hook(fail)
    yield
    hook.remove()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """While inside, kernels add in the same order each time, and those that cannot raise.

    Has to begin before the process's first matrix product on a GPU, as PyTorch and cuBLAS read the variable once. Not
    `warn_only`: with it the backward pass of attention keeps its faster kernels, which add in any order.
    """
    with patch.dict(os.environ, CUBLAS_WORKSPACE_CONFIG=":4096:8"):
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@deterministic()
def offloaded(scale: Scale) -> Result:
    """Train all weights with everything on the GPU, and with a part offloaded to CPU: memory, time and weights."""
    scale = replace(scale, completions=16)
    found: dict[str, Result] = {}
    weights = {}
    parts: dict[str, dict[str, Any]] = {
        "on the GPU": {},
        "gradients": {"gradients_on_host": True},
        "activations": {"activations_on_host": True},
    }
    for name, settings in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            # one token at most in a micro-batch: each sequence by itself, so that both compute alike
            setting = Update(1, **settings)
            made = trainer(scale, folder, torch.bfloat16, update=setting, max_steps=3, gradient_checkpointing=True)
            record = train(made)
        weights[name] = {key: weight.cpu().clone() for key, weight in made.model.state_dict().items()}
        seconds = [row["time/update"] for row in record.logs]
        found[name] = {"update_gb": made.memory.highest["memory/update_gb"], "update_s": min(seconds)}
        del made
    expected = weights["on the GPU"]
    equal = {
        name: all(torch.equal(weight, expected[key]) for key, weight in own.items()) for name, own in weights.items()
    }
    return {**found, "weights bitwise equal": equal}


def bitsandbytes(scale: Scale) -> Result:
    """Train by each 8-bit optimizer, and an adapter on a base in NF4."""
    found: Result = {}
    common = {"max_steps": 3, "update": Update(4096)}
    optimizers = ("adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit") if scale.device == "cuda" else ("adamw_8bit",)
    for optimizer in optimizers:
        with tempfile.TemporaryDirectory() as folder:
            made = trainer(scale, folder, torch.bfloat16, optim=optimizer, gradient_checkpointing=True, **common)
            logs = train(made).logs
        found[optimizer] = summary_of(made, logs)
        del made
    with tempfile.TemporaryDirectory() as folder:
        build_policy(scale.model, scale.device).save_pretrained(folder)
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
        made = trainer(scale, folder, model=folder, quantization_config=quantization, peft_config=LORA, **common)
        found["NF4"] = summary_of(made, train(made).logs)
    return found


def summary_of(made: Any, logs: list[dict[str, Any]]) -> Result:
    """Return memory, time and gradients of a training."""
    return {
        "update_gb": made.memory.highest["memory/update_gb"],
        "step_s": min(row["step_time"] for row in logs),
        "grad_norms": [float(row["grad_norm"]) for row in logs],
    }


def vllm(scale: Scale, sleeps: bool) -> Result:
    """Train with vLLM beside the policy, awake or asleep during updates: the engine check, memory and time.

    Each is an experiment of its own, as an engine may keep its memory until its process ends.
    """
    if sleeps and scale.device == "cpu":
        return {"skipped": "vLLM sleeps on GPUs only"}
    with tempfile.TemporaryDirectory() as folder:
        build_policy(scale.model, scale.device).save_pretrained(folder)
        AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny").save_pretrained(folder)
        options = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_enable_sleep_mode": sleeps,
            "vllm_gpu_memory_utilization": 0.3 if scale.device == "cuda" else 0.1,
            "vllm_max_model_length": scale.completion + 128,
        }
        common = {"model": folder, "max_steps": 3, "rollout_func": None, "peft_config": LORA}
        dtype = "bfloat16" if scale.device == "cuda" else "float32"
        made = trainer(scale, folder, **common | options | {"model_init_kwargs": {"dtype": dtype}})
        logs = train(made).logs
    return {
        **summary_of(made, logs),
        "generate_s": min(row["time/generate"] for row in logs),
        **{key: logs[0][key] for key in ("engine/logp_difference", "engine/tolerance", "engine/is_policy")},
    }


def cell(name: str, scale: Scale) -> Result:
    """Train two steps of a cell of docs/memory.md beside its plan."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        planned = memory.plan_cells([name])[name]
        measured = memory.run_cell(planned["overrides"], None, toy=scale == TOY)
    return {"planned_gb": planned["planned_gb"], "reference_gb": planned["reference_gb"], **measured}


def update_speed(scale: Scale) -> Result:
    """Time the update in turns with stock TRL and its fused head; see benchmarks.update."""
    args = argparse.Namespace(
        model="qwen2_5_1_5b" if scale == REAL else "toy", device=scale.device, rows=scale.completions, repeats=2
    )
    args.budget = PLANNED if scale == REAL else "auto"
    return {letter: update.measure(letter, args) for letter in (update.WORKLOADS if scale == REAL else "a")}


def generation(scale: Scale) -> Result:
    """Count tokens per second by transformers and by vLLM; see benchmarks.generation."""
    from benchmarks import generation as rates  # imports vLLM

    with tempfile.TemporaryDirectory() as folder:
        name = rates.random_weights("qwen2_5_1_5b" if scale == REAL else "toy", folder, scale.device)
        return {"tokens per second": rates.generation(name, rates.COUNTS if scale == REAL else (4,))}


def whole_step(scale: Scale) -> Result:
    """Time whole steps, generation by transformers included, by stock TRL and by ours."""
    scale = replace(scale, completion=scale.completion // 4)
    found: Result = {}
    for name, kind in (("trl", GRPOTrainer), ("ours", ExactGRPOTrainer)):
        options = generating(scale, trainer_class=kind, max_steps=2, peft_config=LORA)
        if scale.device == "cuda":
            options |= {"bf16": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 8}
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            if kind is ExactGRPOTrainer:
                options |= {"update": Update(PLANNED)}
            record: Record = train(trainer(scale, folder, torch.bfloat16, **options))
        steps = [row["step_time"] for row in record.logs]
        found[name] = {"step_s": min(steps), "with loading_s": time.perf_counter() - started}
    return {**found, "ratio": found["trl"]["step_s"] / found["ours"]["step_s"]}


EXPERIMENTS: dict[str, Callable[[Scale], Result]] = {
    "exactness": exactness,
    "auto": auto,
    "OOM retries": out_of_memory,
    "offloaded to CPU": offloaded,
    "bitsandbytes": bitsandbytes,
    "vllm awake": partial(vllm, sleeps=False),
    "vllm asleep": partial(vllm, sleeps=True),
    "update": update_speed,
    "generation": generation,
    "whole step": whole_step,
}
"""By name, in the order in which they are worth the time."""
NEEDS_VLLM = ("vllm awake", "vllm asleep", "generation")


def run(name: str, scale: Scale) -> Result:
    """Run an experiment or a cell by its name, `cell LoRA 3B`."""
    if name.startswith("cell "):
        return cell(name.removeprefix("cell "), scale)
    return EXPERIMENTS[name](scale)
