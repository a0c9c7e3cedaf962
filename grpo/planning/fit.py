"""Whether a run fits: the memory of its machine, the memory it takes, and the choices that are left to the plan."""

import copy
import math
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig

from grpo.config.batch import node_range
from grpo.config.devices import check_device, vendor_of, why_no_vllm
from grpo.config.facts import generator_of, is_quantized, tells_kept_tokens
from grpo.config.nodes import why_routers_fixed
from grpo.config.tools import keeps_engine_awake
from grpo.config.transport import QUANTIZES, Transport, transport_of, why_not_experts
from grpo.planning.adapters import why_no_parameters
from grpo.planning.from_config import find_shape, workload_of
from grpo.planning.host import host
from grpo.planning.machine import Machine, machine_for
from grpo.planning.memory import peak, phases
from grpo.planning.shape import Shape
from grpo.planning.vllm_fraction import with_vllm
from grpo.planning.workload import Workload
from grpo.utils.diagnosis import why_biased
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB, HOST_LIMIT, UNMEASURED, USABLE

HEADROOM = 0.08
"""Fraction of the GPU's memory that a plan leaves free, for fragments of the allocator and for errors of the model."""
AT_ONCE = "rollout.completions_at_once"
"""The setting for the completions that transformers generates at once."""
MAX_TOKENS = 16384
"""Tokens per micro-batch that keep any GPU busy; larger micro-batches are not faster."""

VLLM_PAYS = {"cuda": (3e8, 1), "cpu": (1e8, 64), "mps": (math.inf, 1)}
"""Parameters, and tokens per completion, from which on steps with vLLM are faster: for a CPU by
benchmarks/generation_cpu.json, for a GPU a guess; there is no vLLM for PyTorch on a Mac."""


@dataclass
class Plan:
    """Predicted memory of a run, in GiB, and the settings that were chosen for it."""

    model: str
    """Name or folder of the model."""
    device: str
    """Name of the GPU, or of a machine without a GPU."""
    phases: dict[str, dict[str, float]]
    """Memory of the device by phase and component, GiB."""
    capacity_gb: float
    """Free memory of the device, GiB."""
    host: dict[str, float]
    """Host memory by component, GiB."""
    host_capacity_gb: float | None
    """Host memory of the machine, GiB; None if it is not known."""
    settings: dict[str, Any]
    """Values of the keys that the configuration leaves to the plan."""
    unified: bool = False
    """Whether the device is the CPU."""
    shared_gb: float = 0.0
    """Memory that CPU and GPU share, GiB; 0 of a GPU with memory of its own."""
    formats: list[str] = field(default_factory=list)
    """Numbers of 8 and 4 bits that the GPU multiplies; nothing uses them."""
    found: str | None = None
    """With `+gpu=auto`, a line about the GPU that was found."""
    here: bool = True
    """Whether the plan is for this machine."""
    processes: int = 1
    """Number of processes on all machines, each with its device; host memory is per machine."""
    family: str | None = None
    """`model_type` of the model."""
    suggestions: list[dict[str, Any]] = field(default_factory=list)
    """Changes, each with `overrides`, `effect` and its verified `peak_gb` in GiB."""

    @property
    def peak_gb(self) -> float:
        """Memory of the largest phase, GiB."""
        return max(sum(parts.values()) for parts in self.phases.values())

    @property
    def host_gb(self) -> float:
        """Host memory of the run, GiB; on a CPU it holds everything."""
        return self.peak_gb if self.unified else sum(self.host.values())

    @property
    def problem(self) -> str | None:
        """The reason why the run does not fit; None if it fits."""
        if self.peak_gb > (1 - HEADROOM) * self.capacity_gb:
            worst = max(self.phases, key=lambda phase: sum(self.phases[phase].values()))
            usable = f"of which {(1 - HEADROOM) * self.capacity_gb:.1f} GiB may be used"
            return (
                f"{self.peak_gb:.1f} GiB in the {worst} phase; {self.device} has {self.capacity_gb:.1f} GiB, {usable}"
            )
        if not self.unified and self.host_capacity_gb and self.host_gb > HOST_LIMIT * self.host_capacity_gb:
            return f"{self.host_gb:.1f} GiB of host memory; there are {self.host_capacity_gb:.1f} GiB"
        return None

    def expected(self) -> dict[str, float]:
        """Return the expected peaks of PyTorch's allocator, GiB: `peak` in all, and by phase as in `metrics.jsonl`."""
        inside = {
            phase: sum(size for name, size in parts.items() if name != "context")
            for phase, parts in self.phases.items()
        }
        names = {"generate": "rollout", "logprobs": "logprobs", "update": "update"}
        names |= {"reward": "reward"} if "reward" in inside else {}
        return {"peak": max(inside.values()), **{name: inside[phase] for name, phase in names.items()}}

    def as_dict(self) -> dict[str, Any]:
        """Return the content of `plan.json`."""
        return {
            "fits": self.problem is None,
            "problem": self.problem,
            "model": self.model,
            "device": self.device,
            "found": self.found,
            "formats": self.formats,
            "shared_gb": self.shared_gb,
            "processes": self.processes,
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


def make_plan(config: DictConfig, machine: Machine | None = None, least: bool = False) -> Plan:
    """Plan the run of a composed configuration.

    Args:
        machine: the machine of the plan; None for the machine of the configuration.
        least: choose the smallest memory, independent of the GPU: one completion generated at a time.

    Raises:
        ConfigError: a number that determines memory is missing or impossible, or a text model gets images.
    """
    machine = machine or machine_for(config)
    if config.train.use_vllm is None:
        return plan_generation(config, machine, least)
    check_device(config)
    shape = find_shape(config.model)
    if config.task.images and not shape.takes_images:
        raise ConfigError(f"task.images={config.task.images}: the model takes text alone; choose one that takes images")
    if config.train.use_vllm and (why := why_no_experts(config, shape, machine)):
        raise ConfigError(f"{why}; use generation=transformers")
    if config.engine.drafts and shape.recurrent:
        raise ConfigError(f"engine.drafts={config.engine.drafts}: layers of this model keep a state; leave it out")
    least_nodes, most_nodes = node_range(config)
    if least_nodes < most_nodes and (why := why_routers_fixed(config.train, shape.num_experts)):
        raise ConfigError(f"launch.nodes={config.launch.nodes}: {why}")
    transport = transport_of(config, shape.model_type)
    workload = workload_of(config, machine.device, shape.model_type)
    if why := why_no_parameters(shape, workload.adapter):
        raise ConfigError(why)
    if machine.shared:  # the GPU has what the processes leave
        left = machine.shared - sum(host(shape, workload).values())
        machine = replace(machine, capacity=max(1.0, min(machine.capacity, left)))
    workload = replace(workload, gpu_memory=machine.total or machine.capacity)
    workload, settings = choose(config, transport, shape, workload, 0.0 if least else USABLE * machine.capacity)
    return Plan(
        model=config.model.model_name_or_path,
        family=shape.model_type,
        device=machine.name,
        phases={
            phase: {name: size / GB for name, size in parts.items()} for phase, parts in phases(shape, workload).items()
        },
        capacity_gb=machine.capacity / GB,
        host={name: size / GB for name, size in host(shape, workload).items()},
        host_capacity_gb=machine.host / GB if machine.host else None,
        settings=settings,
        unified=machine.device == "cpu",
        shared_gb=machine.shared / GB,
        formats=list(config.gpu.formats) if config.gpu is not None else [],
        found=config.gpu.found if config.gpu is not None else None,
        here=machine.here,
        processes=workload.sharding.processes,
    )


def why_no_experts(config: DictConfig, shape: Shape, machine: Machine) -> str | None:
    """Return why vLLM cannot get the weights of a mixture of experts; None if it can, or without experts.

    Its CPU build repacks experts once it has loaded them (`cpu_prepack_moe_weight`); what is sent later is not.
    """
    if shape.num_experts and machine.device == "cpu":
        return "generation=vllm_*: vLLM on a CPU repacks experts as it loads them, and takes no further ones"
    merged = config.peft is not None and why_not_experts(config.peft, shape.model_type)
    if merged and is_quantized(config.peft):
        return f"peft.quantization: {merged}, and an adapter cannot be merged into quantized weights"
    return (
        f"engine.quantization: {merged}, and would get merged weights"
        if merged and config.engine.quantization
        else None
    )


def plan_generation(config: DictConfig, machine: Machine, least: bool = False) -> Plan:
    """Plan with vLLM if it is installed, supports the policy, is faster and fits; otherwise with transformers."""
    parameters, tokens = VLLM_PAYS[machine.device]
    shape = find_shape(config.model)
    large = shape.parameters() >= parameters
    pays = large and (config.train.max_completion_length or 0) >= tokens
    able = find_spec("vllm") is not None and not why_no_experts(config, shape, machine)
    if is_quantized(config.peft):
        able = able and find_spec(QUANTIZES) is not None and transport_of(config).adapter
    tells_kept = tells_kept_tokens("colocated", vendor_of(config), config.engine.backend)
    able = able and not (why_biased(config.train, tells_kept) or why_no_vllm(config))
    for use_vllm in (True, False) if pays and able and not least else (False,):
        chosen = copy.deepcopy(config)
        chosen.train.use_vllm = use_vllm
        plan = make_plan(chosen, machine, least)
        if not plan.problem:
            break
    plan.settings = {"train.use_vllm": use_vllm, **plan.settings}
    return plan


def choose(
    config: DictConfig, transport: Transport, shape: Shape, workload: Workload, limit: float
) -> tuple[Workload, dict[str, Any]]:
    """Return the workload and the settings that are left to the plan: vLLM's share, and the sizes of batches.

    Args:
        limit: bytes of the device that may be filled.
    """
    settings: dict[str, Any] = {}
    automatic = config["update"].max_tokens_per_microbatch == "auto" and workload.device != "cpu"
    least = min(workload.sequence, UNMEASURED)  # a longer sequence is a micro-batch of its own
    if automatic:
        workload = replace(workload, tokens=least)
    if config.train.use_vllm and config.peft and config.engine.lora == "adapter" and not transport.adapter:
        settings["engine.lora"] = "merged"
    if generator_of(config.train) == "colocated":
        reason = transport.unshared_because
        if config.engine.share_weights is True and reason:
            raise ConfigError(f"engine.share_weights=true: {reason}; use auto")
        shares = reason is None and bool(config.engine.share_weights)
        workload = with_vllm(config.train, shape, workload, limit, shares, keeps_engine_awake(config))
        settings |= {"engine.share_weights": workload.shares_weights} if config.peft is not None else {}
        chosen = {
            "vllm_gpu_memory_utilization": workload.vllm_fraction,
            "vllm_enable_sleep_mode": workload.vllm_sleeps,
            "vllm_max_model_length": workload.sequence,
        }
        settings |= {f"train.{name}": value for name, value in chosen.items() if config.train[name] is None}
    if not config.train.use_vllm:
        workload = generated_at_once(config.rollout.completions_at_once, shape, workload, limit)
        settings[AT_ONCE] = workload.sequences
    if automatic:
        low, high = least, min(MAX_TOKENS, workload.sequence * completions_per_step(config.train))
        while low < high:
            middle = (low + high + 1) // 2
            if peak(shape, replace(workload, tokens=middle), "reward", "logprobs", "update") <= limit:
                low = middle
            else:
                high = middle - 1
        workload = replace(workload, tokens=low)
    settings["update.max_tokens_per_microbatch"] = workload.tokens
    return workload, settings


def generated_at_once(wanted: int | None, shape: Shape, workload: Workload, limit: float) -> Workload:
    """Return the workload with the given number of completions at once, or the number that fits, at least 1."""
    if wanted:
        return replace(workload, sequences=min(workload.sequences, wanted))
    while workload.sequences > 1 and peak(shape, workload, "rollout") > limit:
        workload = replace(workload, sequences=(workload.sequences + 1) // 2)
    return workload


def completions_per_step(train: DictConfig) -> int:
    """Return the number of completions per optimizer step and device."""
    return train.per_device_train_batch_size * train.gradient_accumulation_steps
