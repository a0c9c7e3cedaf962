"""Three optimizer steps of the real trainer with random weights, and their memory."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from trl import GRPOConfig

from grpo.config.resolve import Resolved, resolve
from grpo.config.schema import ROOT, register, train_arguments
from grpo.extras.measuring.cases import Case
from grpo.extras.measuring.tensors import PeakTracker, TensorReadings
from grpo.model import policy
from grpo.planning.fit import make_plan
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.context import Context
from grpo.trainer.measurements import MemoryReadings

WORDS = ROOT / "grpo" / "builtin" / "tiny"
"""Folder of the tokenizer: of all words of a policy only some are used."""


def measure(case: Case, device: str) -> dict[str, Any]:
    """Train three steps of a case; return its memory, GiB, its seconds and its repeated micro-batches.

    On a CPU the memory is that of tensors (`grpo.extras.measuring.tensors`), and nothing is reserved.
    """
    logging.set_verbosity_error()
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("config", list(case.overrides))
        settings = resolve(config, make_plan(config))
    tracker = PeakTracker() if device == "cpu" else None
    memory = TensorReadings(tracker) if tracker else None
    with tempfile.TemporaryDirectory() as folder:
        trainer = random_trainer(settings, Path(folder), memory, fixed=case.long)
        if tracker:
            tracker.track_external(trainer.model)
        with tracker or nullcontext():
            trainer.train()
            trainer.memory.note()
    readings, steps = trainer.memory.highest, [row for row in trainer.state.log_history if "time/update" in row]
    phases = {phase: "peak_allocated" if phase == "peak" else phase for phase in case.planned}
    reserved = readings.get("memory/peak_reserved_gb")
    return {
        "measured_gb": {phase: round(readings[f"memory/{name}_gb"], 4) for phase, name in phases.items()},
        "reserved_gb": None if reserved is None else round(reserved, 4),
        "seconds_per_update": round(steps[-1]["time/update"], 3),
        "oom_retries": int(sum(row["update/oom_retries"] for row in steps)),
    }


def random_trainer(
    settings: Resolved, folder: Path, memory: MemoryReadings | None = None, fixed: bool = False
) -> ExactGRPOTrainer:
    """Return the trainer of a resolved configuration, with random weights and completions of full length.

    Args:
        settings: with the shape of the policy.
        folder: gets the policy's configuration, and before a quantization its weights; nothing is downloaded.
        memory: gets the readings; new ones if None.
        fixed: the completions are given instead of generated.
    """
    tokenizer = AutoTokenizer.from_pretrained(WORDS)
    on_gpu = torch.cuda.is_available() and not settings.train.use_cpu
    model = random_policy(settings, folder, "cuda" if on_gpu else "cpu")
    quantization = policy.quantization_config(settings.peft)
    model_group = settings.model.copy()
    OmegaConf.set_readonly(model_group, False)
    model_group.model_name_or_path = str(folder)  # no network on a machine with a GPU of its own
    length = settings.train.max_completion_length
    words = settings.task.max_prompt_length - len(tokenizer("")["input_ids"])
    arguments = train_arguments(settings.train) | {
        "max_steps": 3,
        "num_iterations": 2,  # the third step generates again, beside the state of the optimizer
        "generation_kwargs": {"min_new_tokens": length},
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "push_to_hub": False,
        "log_completions": False,
        "disable_tqdm": True,
        "use_cpu": not on_gpu,
    }
    if quantization:
        arguments["model_init_kwargs"] = {"dtype": settings.model.dtype}
    return ExactGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **arguments),
        train_dataset=Dataset.from_dict({"prompt": ["1 " * words] * 256}),
        processing_class=tokenizer,
        quantization_config=quantization,
        peft_config=policy.peft_config(settings.peft, model_group),
        update=settings.update,
        context=Context(memory=memory),
        rollout_func=fixed_completions(tokenizer, length) if fixed else None,
    )


def random_policy(settings: Resolved, folder: Path, device: str) -> Any:
    """Return a policy with random weights on a device; before a quantization, the folder from which it is loaded."""
    torch.manual_seed(0)
    shape = {name: number for name, number in settings.model.shape.items() if name != "parameters"}
    config = AutoConfig.for_model(**shape)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.model.dtype))
    config.save_pretrained(folder)
    if not policy.quantization_config(settings.peft):
        return model
    model.save_pretrained(folder)
    return str(folder)


def fixed_completions(tokenizer: Any, length: int) -> Callable[..., dict[str, Any]]:
    """Return a `rollout_func` whose completions have a length, tokens, in place of a generation."""

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [torch.randint(3, 80, (length,)).tolist() for _ in prompts]
        return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}

    return rollouts


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Return different rewards, so that no completion is skipped in the update."""
    return [float(place) for place, _ in enumerate(completions)]
