"""A trainer with vLLM beside the policy, faults of its engine, and the check of log-probabilities that finds them."""

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoTokenizer
from trl import GRPOConfig

from grpo.builtin.tasks.arithmetic import problems
from grpo.config.schema import ROOT
from grpo.generation.vllm.engine import PolicyEngine
from grpo.options import Engine
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout import engine_check
from grpo.utils.errors import GenerationError
from grpo.utils.patching import replaced

TINY = str(ROOT / "grpo" / "builtin" / "tiny")
RESTART = 10
"""Steps after which a server has its first weights again."""
LORA = LoraConfig(r=8, lora_alpha=64, target_modules="all-linear")
Weights = Iterator[tuple[str, torch.Tensor]]


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return anything that differs between completions."""
    return [float(sum(ids) % 5) for ids in completion_ids]


def trainer(
    directory: Path,
    peft_config: LoraConfig | None = None,
    model: str = TINY,
    dtype: str = "float32",
    engine: Engine | None = None,
    **options: Any,
) -> ExactGRPOTrainer:
    """Return a trainer with vLLM beside the policy, merged by default; `options` are fields of GRPOConfig."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 16,
        "learning_rate": 1e-3,
        "max_steps": 3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 96,
        "vllm_gpu_memory_utilization": 0.01,
        "model_init_kwargs": {"dtype": dtype},
        **options,
    }
    prompts = [problem.question for problem in islice(problems("train"), 64)]
    return ExactGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(directory), **settings),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=peft_config,
        engine=engine,
    )


def never_sent(made: ExactGRPOTrainer) -> None:
    """Let the engine keep the weights, or the adapter, that it has."""
    made.vllm_generation.sync_weights = lambda: None


def adapter_twice(made: ExactGRPOTrainer) -> None:
    """Send the weights with the adapter counted twice."""
    send = made.vllm_generation._iter_named_params

    def twice() -> Weights:
        layers = [module for module in made.model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in layers:
            layer.scaling["default"] *= 2
        yield from send()
        for layer in layers:
            layer.scaling["default"] /= 2

    made.vllm_generation._iter_named_params = twice


def first_weights(made: ExactGRPOTrainer) -> None:
    """Send the first weights again from a step on, as a server has them that was started again."""
    send = made.vllm_generation._iter_named_params
    first = [(name, weight.clone()) for name, weight in send()]
    made.vllm_generation._iter_named_params = lambda: send() if made.state.global_step < RESTART else iter(first)


def layer_left_out(made: ExactGRPOTrainer) -> None:
    """Send all weights but those of the second layer."""
    send = made.vllm_generation._iter_named_params
    made.vllm_generation._iter_named_params = lambda: (pair for pair in send() if ".layers.1." not in pair[0])


FAULTS: dict[str, Callable[[ExactGRPOTrainer], None]] = {
    "weights never sent": never_sent,
    "adapter counted twice": adapter_twice,
    f"first weights again after step {RESTART}": first_weights,
    "one layer left out": layer_left_out,
}


def check(fault: str | None, steps: int, every: int = 1, **options: Any) -> dict[str, Any]:
    """Train with a faulty engine, or a healthy one; return the largest difference, and the step that was stopped.

    Args:
        every: steps between two checks.
        options: of `trainer`.
    """
    by_bits = replaced(PolicyEngine, "check_transfer", lambda engine: None)  # which finds these faults first
    with tempfile.TemporaryDirectory() as folder, replaced(engine_check, "EVERY", every), by_bits:
        made = trainer(Path(folder), max_steps=steps, **options)
        if fault:
            FAULTS[fault](made)
        stopped_after = None
        try:
            made.train()
        except GenerationError:
            stopped_after = made.state.global_step
        rows = [row for row in made.state.log_history if "engine/is_policy" in row]
        return {
            "checks": len(rows),
            "largest_difference": max(row["engine/logp_difference"] for row in rows),
            "tolerance": rows[0]["engine/tolerance"],
            "stopped_after_step": stopped_after,
        }
