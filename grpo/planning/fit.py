"""Whether a run fits: the memory it will find, what it will take, and what the configuration leaves to be chosen."""

import copy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig

from grpo.config.library import GRPO_CONFIG, library_fields
from grpo.config.schema import PLANNED
from grpo.limits import GB, HOST_LIMIT, USABLE
from grpo.planning.from_config import find_shape, job_of
from grpo.planning.machine import Machine, machine_for
from grpo.planning.memory import host, peak, phases
from grpo.planning.shape import Shape
from grpo.planning.vllm_share import with_vllm
from grpo.planning.workload import Job

HEADROOM = 0.08
"""The share of the card that a plan leaves free, for fragments of the allocator and for what was not thought of."""
MOST_TOKENS = 16384
"""Tokens that keep any GPU busy; larger micro-batches are not faster."""

VLLM_PAYS = {"cuda": (3e8, 1), "cpu": (1e8, 64)}
"""Parameters and tokens of a completion from which on steps with vLLM are faster: for a CPU by
benchmarks/generation_cpu.json, for a GPU a guess."""


@dataclass
class Plan:
    """What a run will take, in GB (2**30 bytes), and what was chosen for it."""

    model: str
    device: str
    phases: dict[str, dict[str, float]]
    capacity_gb: float
    host: dict[str, float]
    host_capacity_gb: float | None
    settings: dict[str, Any]
    """What the plan chose where the configuration leaves it open."""
    unified: bool = False
    """Whether the device's memory is the host's, as on a CPU."""
    here: bool = True
    """Whether it is planned for the machine at hand."""
    suggestions: list[dict[str, Any]] = field(default_factory=list)
    """Each with `overrides`, `effect` and the `peak_gb` it was verified to have."""

    @property
    def peak_gb(self) -> float:
        """The largest phase."""
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def host_gb(self) -> float:
        """What the host holds; on a CPU that is everything."""
        return self.peak_gb if self.unified else sum(self.host.values())

    @property
    def problem(self) -> str | None:
        """Why it does not fit, or None."""
        if self.peak_gb > (1 - HEADROOM) * self.capacity_gb:
            worst = max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
            usable = f"of which {(1 - HEADROOM) * self.capacity_gb:.1f} GB may be used"
            return f"{self.peak_gb:.1f} GB in the {worst} phase; {self.device} has {self.capacity_gb:.1f} GB, {usable}"
        if not self.unified and self.host_capacity_gb and self.host_gb > HOST_LIMIT * self.host_capacity_gb:
            return f"{self.host_gb:.1f} GB of host memory; there are {self.host_capacity_gb:.1f} GB"
        return None

    def expected(self) -> dict[str, float]:
        """Return what readings of PyTorch's allocator should show, in all and by phase as in `metrics.jsonl`, GB."""
        inside = {
            phase: sum(size for name, size in parts.items() if name != "context")
            for phase, parts in self.phases.items()
        }
        names = {"generate": "rollout", "logprobs": "logprobs", "update": "update"}
        return {"peak": max(inside.values()), **{name: inside[phase] for name, phase in names.items()}}

    def as_dict(self) -> dict[str, Any]:
        """Return what `plan.json` holds."""
        return {
            "fits": self.problem is None,
            "problem": self.problem,
            "model": self.model,
            "device": self.device,
            "peak_gb": self.peak_gb,
            "capacity_gb": self.capacity_gb,
            "headroom": 1 - self.peak_gb / self.capacity_gb,
            "host_gb": self.host_gb,
            "host_capacity_gb": self.host_capacity_gb,
            "phases": self.phases,
            "host": self.host,
            "settings": self.settings,
            "suggestions": self.suggestions,
        }


def make_plan(config: DictConfig, machine: Machine | None = None) -> Plan:
    """Plan the run of a composed configuration.

    Args:
        machine: that it is for; found out if None.

    Raises:
        ConfigError: something that memory follows from is missing or impossible.
    """
    machine = machine or machine_for(config)
    if config.train.use_vllm is None:
        return plan_generation(config, machine)
    shape = find_shape(config.model)
    job = replace(job_of(config, machine.device), card=machine.card or machine.capacity)
    job, settings = choose(config, shape, job, USABLE * machine.capacity)
    return Plan(
        model=config.model.model_name_or_path,
        device=machine.name,
        phases={
            phase: {name: size / GB for name, size in parts.items()} for phase, parts in phases(shape, job).items()
        },
        capacity_gb=machine.capacity / GB,
        host={name: size / GB for name, size in host(shape, job).items()},
        host_capacity_gb=machine.host / GB if machine.host else None,
        settings=settings,
        unified=machine.device == "cpu",
        here=machine.here,
    )


def plan_generation(config: DictConfig, machine: Machine) -> Plan:
    """Plan with vLLM where it is installed, can take the policy, pays and fits, else with transformers."""
    parameters, tokens = VLLM_PAYS[machine.device]
    large = find_shape(config.model).parameters() >= parameters
    pays = large and (config.train.max_completion_length or 0) >= tokens
    able = find_spec("vllm") is not None and not (config.peft and config.peft.get("quantization"))
    for use_vllm in (True, False) if pays and able else (False,):
        chosen = copy.deepcopy(config)
        chosen.train.use_vllm = use_vllm
        plan = make_plan(chosen, machine)
        if not plan.problem:
            break
    plan.settings = {"train.use_vllm": use_vllm, **plan.settings}
    return plan


def settle(config: DictConfig, plan: Plan | None) -> None:
    """Put into a configuration what the plan chose for this machine, and where it did not, what TRL would."""
    train, update = config.train, config["update"]
    settings = plan.settings if plan and plan.here else {}
    if plan and plan.here and not plan.unified and update.max_tokens_per_microbatch == "auto":
        update.max_tokens_per_microbatch = settings["update.max_tokens_per_microbatch"]
    for name in PLANNED:
        if train[name] is None:
            train[name] = settings.get(f"train.{name}", library_fields(GRPO_CONFIG)[name][1])


def choose(config: DictConfig, shape: Shape, job: Job, limit: float) -> tuple[Job, dict[str, Any]]:
    """Return the job with what the configuration leaves to the plan: vLLM's share, rows at once, tokens at once.

    Args:
        limit: bytes of the device that these may fill.
    """
    settings: dict[str, Any] = {}
    automatic = config["update"].max_tokens_per_microbatch == "auto" and job.device == "cuda"
    if automatic:
        job = replace(job, tokens=job.row)
    colocated = config.train.use_vllm and config.train.vllm_mode == "colocate"
    if colocated:
        job = with_vllm(config.train, shape, job, limit)
        chosen = {
            "vllm_gpu_memory_utilization": job.vllm_share,
            "vllm_enable_sleep_mode": job.vllm_sleeps,
            "vllm_max_model_length": job.row,
        }
        settings |= {f"train.{name}": value for name, value in chosen.items() if config.train[name] is None}
    if not config.train.use_vllm:  # the trainer halves what does not fit, so only one row has to
        while job.rows > 1 and peak(shape, job, "rollout") > limit:
            job = replace(job, rows=(job.rows + 1) // 2)
        settings["rows_generated_at_once"] = job.rows
    if automatic:
        low, high = job.row, max(job.row, min(MOST_TOKENS, job.row * rows_of_step(config.train)))
        while low < high:
            middle = (low + high + 1) // 2
            if peak(shape, replace(job, tokens=middle), "logprobs", "update") <= limit:
                low = middle
            else:
                high = middle - 1
        job = replace(job, tokens=low)
    settings["update.max_tokens_per_microbatch"] = job.tokens
    return job, settings


def rows_of_step(train: DictConfig) -> int:
    """Return the completions of one optimizer step on a device."""
    return train.per_device_train_batch_size * train.gradient_accumulation_steps
