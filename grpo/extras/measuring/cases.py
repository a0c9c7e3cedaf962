"""The cases that `python -m grpo.measure` compares: command lines of `grpo.train`, each with its plan."""

from collections.abc import Mapping
from dataclasses import dataclass

from hydra import compose

from grpo.config.check import check
from grpo.extras.plan_tables.table import CHECKPOINTED, METHODS
from grpo.planning.fit import Plan, make_plan
from grpo.planning.machine import machine_for

ROOM = 0.8
"""Fraction of the GPU's free memory that a case may take; its model has fewer layers where all would take more."""
OUTSIDE = ("context", "process", "fragments")
"""Components of a plan that are no tensors: no measurement contains them."""
LORA = {**CHECKPOINTED, "peft": "lora"}
SHORT = {**METHODS, "LoRA, no checkpointing": {**LORA, "train.gradient_checkpointing": "false"}}
"""Methods for short sequences."""
PAGED = "+ paged AdamW"
"""The method whose optimizer needs a GPU."""


@dataclass(frozen=True)
class Scale:
    """The sizes of the cases."""

    models: tuple[str, str]
    """Two choices of `conf/model`: with all methods, and with adapters."""
    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of a completion of a short sequence."""
    long: int
    """Tokens of the completion of a long sequence."""
    microbatch: int
    """`update.max_tokens_per_microbatch`."""
    tile: int
    """`update.mlp_tile`."""
    layers: int | None
    """Layers at most; None for as many as fit."""


SCALES = {
    "cuda": Scale(("qwen2_5_1_5b", "llama3_1_8b"), 256, 256, 16384, microbatch=2048, tile=4096, layers=None),
    "cpu": Scale(("smollm2_135m", "qwen2_5_0_5b"), 32, 32, 224, microbatch=256, tile=64, layers=2),
}
"""By device. A CPU computes small tensors: the code is that of a GPU, and only the sizes and the meter differ."""


@dataclass(frozen=True)
class Case:
    """A command line with the numbers that are written beside its memory."""

    model: str
    method: str
    layers: int
    prompt: int
    completion: int
    completions: int
    """Completions per step."""
    overrides: tuple[str, ...]
    long: bool
    """Whether its completions are fixed: a long one would be generated for minutes."""
    planned: Mapping[str, float]
    """Planned memory of tensors by phase and at its peak, GiB."""

    @property
    def name(self) -> str:
        """Model, method and length in words."""
        return f"{self.model}, {self.layers} layers, {self.method}, {self.prompt} + {self.completion} tokens"


def long_methods(tile: int) -> dict[str, dict[str, str]]:
    """Return the methods for a long sequence, by name."""
    offload = {"update.activations_on_host": "true"}
    tiles = {"update.mlp_tile": str(tile)}
    saved: dict[str, dict[str, str]] = {"": {}, " + activations offloaded": offload, " + tiled MLP": tiles}
    saved[" + activations offloaded, tiled MLP"] = offload | tiles
    bases = {"LoRA": LORA, "8-bit AdamW": CHECKPOINTED}
    return {base + name: {**change, **options} for base, change in bases.items() for name, options in saved.items()}


def cases(device: str) -> list[Case]:
    """Return the planned cases of a device, `cuda` or `cpu`, in the order of their worth; Hydra is initialized."""
    scale = SCALES[device]
    small, large = scale.models
    chosen = [(small, name, change, False) for name, change in SHORT.items() if device == "cuda" or name != PAGED]
    chosen += [(small, name, change, True) for name, change in long_methods(scale.tile).items()]
    chosen += [(large, name, SHORT[name], False) for name in ("LoRA", "QLoRA", "LoRA, no checkpointing")]
    return [planned_case(device, *case) for case in chosen]


def planned_case(device: str, model: str, method: str, change: dict[str, str], long: bool) -> Case:
    """Return a case with as many layers as fit, at least one."""
    scale = SCALES[device]
    completion, completions = (scale.long, 2) if long else (scale.completion, 8)
    settings = {
        "model.model_name_or_path": f"random-{model}",
        "model.dtype": "bfloat16",
        "train.bf16": "true",
        "train.use_cpu": str(device == "cpu").lower(),
        "train.per_device_train_batch_size": str(completions),
        "train.gradient_accumulation_steps": "1",
        "train.num_generations": str(completions),
        "train.max_completion_length": str(completion),
        "task.max_prompt_length": str(scale.prompt),
        "update.max_tokens_per_microbatch": str(scale.microbatch),
    }
    settings = {"model": model, "generation": "transformers", "train.optim": "adamw_8bit"} | change | settings
    words = [
        *(f"{key}={value}" for key, value in settings.items()),
        "~model.shape.parameters",
    ]  # follows from the shape
    config = compose("config", words)
    check(config)
    machine, shape = machine_for(config), config.model.shape
    for layers in range(min(shape.num_hidden_layers, scale.layers or shape.num_hidden_layers), 0, -1):
        shape.num_hidden_layers = layers
        plan = make_plan(config, machine)
        if plan.peak_gb <= ROOM * plan.capacity_gb:
            break
    overrides = (*words, f"model.shape.num_hidden_layers={layers}")
    planned = planned_memory(plan, long)
    return Case(model, method, layers, scale.prompt, completion, completions, overrides, long, planned)


def planned_memory(plan: Plan, fixed: bool) -> dict[str, float]:
    """Return the planned memory of tensors, GiB: by phase as the trainer reads it, and `peak`."""
    names = {"rollout": "generate", "logprobs": "logprobs", "update": "update"}
    if fixed:
        del names["rollout"]
    by_phase = {
        names[phase]: sum(size for name, size in parts.items() if name not in OUTSIDE)
        for phase, parts in plan.phases.items()
        if phase in names
    }
    return {name: round(size, 4) for name, size in (by_phase | {"peak": max(by_phase.values())}).items()}
