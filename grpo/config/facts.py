"""The facts of a run that its features depend on: of a configuration or of a script's trainer.

It loads neither Hydra nor OmegaConf, as a script that trains does not.
"""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.version import Version

from grpo.options import VLLM

WEIGHTS_DIVIDED = ("FSDP2", "ZeRO-3")
"""Kinds of sharding in which each process has a part of the weights."""


@dataclass(frozen=True)
class Facts:
    """Features of a run that others depend on."""

    train: Any
    """A `trl.GRPOConfig`, or its group of the configuration."""
    update: Any
    """An `Update`, or its group; likewise the next two."""
    engine: Any
    rollout: Any
    processes: int
    """Processes that train."""
    device: str
    """Maker of the GPU: `nvidia`, `amd` or `apple`; `cpu` without one."""
    generator: str
    """Who generates: `transformers`, an engine that is `colocated` or a `server`, or a `script` by its `rollout_func`;
    `undecided` if the plan chooses."""
    sharding: str | None
    """`FSDP2`, `ZeRO-2`, `ZeRO-3`; None if each process has everything."""
    adapter: bool
    """Whether adapters are trained instead of all weights."""
    quantized: bool
    """Whether the weights below the adapters are quantized."""
    images: bool
    mixture: bool
    stream: bool
    """Whether problems are read while the run runs."""
    in_process: bool
    """Whether a reward model or a script's `rollout_func` works in the process of the policy."""
    dtype: str = "float32"
    """Data type of the weights; a script's are converted to one that can be trained."""
    merged: str | None = None
    """Why vLLM would get merged weights; None if it gets the adapter, or if a script decides."""

    @property
    def by_vllm(self) -> bool:
        """Whether an engine generates."""
        return self.generator in ("colocated", "server")

    @property
    def tells_kept(self) -> bool:
        """Whether the engine tells the tokens that a sampling filter has kept, however many."""
        return tells_kept_tokens(self.generator, self.device, self.engine.backend)

    @property
    def optim(self) -> str:
        """Name of the optimizer; the text of transformers' enumeration is another."""
        return str(getattr(self.train.optim, "value", self.train.optim))

    @property
    def slices(self) -> int:
        """Number of slices of a generation."""
        return self.train.steps_per_generation or self.train.gradient_accumulation_steps


def generator_of(train: Any) -> str:
    """Return who generates, as in `Facts`, of the group `train`."""
    if train.use_vllm is None:
        return "undecided"
    return ("server" if train.vllm_mode == "server" else "colocated") if train.use_vllm else "transformers"


def tells_kept_tokens(generator: str, device: str, backend: str) -> bool:
    """Return whether an engine tells the tokens that a sampling filter has kept, however many.

    vLLM does from 0.28 on, on GPUs: its sampler on a CPU has no such masks, and its server's completions neither.
    Your own `engine.backend` returns them with each log-probability. Arguments as of `Facts`.
    """
    if generator != "colocated" or backend != VLLM:
        return generator == "colocated"
    try:
        return device in ("nvidia", "amd") and Version(version("vllm")) >= Version("0.28")
    except PackageNotFoundError:  # a plan for another machine, or vLLM's CPU build
        return device in ("nvidia", "amd")


def sharding_strategy(train: Any) -> str | None:
    """Return how processes divide weights, as in `Facts`, of the group `train` or a file of `accelerate launch`."""
    if train.fsdp or os.environ.get("ACCELERATE_USE_FSDP") == "true":
        return "FSDP2"
    options = {} if isinstance(train.deepspeed, str) else train.deepspeed or {}
    stage = (options.get("zero_optimization") or {}).get("stage")
    return f"ZeRO-{stage}" if stage else None


def is_quantized(peft: Any) -> bool:
    """Return whether the group `peft` quantizes the weights below its adapters."""
    return peft is not None and bool(peft.get("quantization"))
