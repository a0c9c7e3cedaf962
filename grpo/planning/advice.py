"""Suggestions for a run that does not fit, or that leaves half of its GPU unused; each has been planned again."""

from collections.abc import Iterator, Sequence
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.config.batch import node_range
from grpo.config.check import check, check_shard
from grpo.config.facts import generator_of, is_quantized
from grpo.config.library import DEFAULT_OPTIMIZER
from grpo.config.schema import ROOT
from grpo.planning import images
from grpo.planning.fit import Plan, make_plan
from grpo.planning.from_config import find_shape, shipped_models, workload_of
from grpo.planning.machine import Machine, machine_for
from grpo.planning.sharding import sharding_of
from grpo.planning.workload import Sharding
from grpo.utils.distributed import world_size
from grpo.utils.errors import ConfigError

MAX_SUGGESTIONS = 4
"""Suggestions that are shown at most."""
MACHINE = 8
"""GPUs of the largest usual machine."""
LOW_USE = 0.5
"""Fraction of the GPU's memory below which a run could make better use of it."""
Change = tuple[dict[str, str], str]
"""Overrides, and their effect on the result."""


class Planner:
    """Plans variants of a command line."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = list(overrides)
        self.machine: Machine | None = None
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def config(self, change: dict[str, str]) -> DictConfig:
        """Compose the command line with other overrides; choices of groups need Hydra, values do not."""
        groups = {key: value for key, value in change.items() if (ROOT / "conf" / key).is_dir()}
        line = (*self.overrides, *(f"{key}={value}" for key, value in groups.items()))  # the last of a key wins
        if line not in self.composed:
            self.composed[line] = compose("config", list(line))
        config = self.composed[line].copy()
        for key, value in change.items():
            if key not in groups:
                OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
        return config

    def plan(self, change: dict[str, str], least: bool = False) -> Plan | None:
        """Plan with other overrides, with the `least` memory if wanted; None if they exclude each other."""
        try:
            config = self.config(change)
            OmegaConf.resolve(config)  # each interpolation once, and not at each access
            check(config)
            check_shard(config)
            self.machine = self.machine or machine_for(config)
            return make_plan(config, self.machine, least)
        except (ConfigError, HydraException, OmegaConfBaseException):
            return None


def advise(overrides: Sequence[str], config: DictConfig, plan: Plan) -> list[dict[str, Any]]:
    """Return overrides to add to a command line: those that harm the result least first, none if the run fits well.

    Hydra has to be initialized; it has composed the configuration from the overrides.
    """
    planner = Planner(overrides)
    if plan.problem:
        suggestions = remedies(config, planner)
    elif plan.unified or plan.peak_gb >= LOW_USE * plan.capacity_gb:
        suggestions = single_changes(list(onto_the_gpu(config)), planner, 1)
    else:
        suggestions = better_uses(config, planner)
    # another choice of a group would not replace keys of it that were typed
    fixed = tuple(
        f"{group}=" for group in ("model", "peft") if any(w.lstrip("+~").startswith(f"{group}.") for w in overrides)
    )
    possible = [
        suggestion for suggestion in suggestions if not any(word.startswith(fixed) for word in suggestion["overrides"])
    ]
    if plan.problem and not possible and not plan.unified:
        return sharded_over_several(config, planner)
    return possible


def remedies(config: DictConfig, planner: Planner) -> list[dict[str, Any]]:
    """Return changes that make a run fit: the smallest combination, then single changes."""
    changes = list(harmless_first(config))
    combined: list[Change] = []
    suggestions: list[dict[str, Any]] = []
    for change in changes:
        combined.append(change)
        if suggestion := verified(combined, planner):
            for needless in combined[:-1]:  # earlier changes may no longer be needed
                fewer = [other for other in combined if other is not needless]
                if shorter := verified(fewer, planner):
                    combined, suggestion = fewer, shorter
            suggestions.append(suggestion)
            break
    return suggestions + single_changes(changes, planner, MAX_SUGGESTIONS - len(suggestions), besides=suggestions)


def single_changes(
    changes: Sequence[Change], planner: Planner, limit: int, besides: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the first change of each key that alone makes the run fit and is not in `besides`; `limit` at most."""
    by_key: dict[str, dict[str, Any]] = {}
    shown: list[dict[str, Any]] = []
    for change in changes:
        (key,) = change[0]
        if len(shown) < limit and key not in by_key and (suggestion := verified([change], planner)):
            by_key[key] = suggestion
            shown = [suggestion for suggestion in by_key.values() if suggestion not in besides]
    return shown


def verified(changes: Sequence[Change], planner: Planner) -> dict[str, Any] | None:
    """Return changes as a suggestion if the run fits with them, else None."""
    overrides: dict[str, str] = {}
    for change, _ in changes:
        overrides |= change
    planned = planner.plan(overrides)
    if planned is None or planned.problem:
        return None
    effects = [effect for change, effect in changes if change.items() <= overrides.items()]
    words = [f"{key}={value}" for key, value in overrides.items()]
    return {"overrides": words, "effect": "; ".join(effects), "peak_gb": planned.peak_gb}


def more_gpus(config: DictConfig) -> Iterator[Change]:
    """Yield more processes, from a full machine on as more machines; nothing if a launcher has started them already."""
    launch = config.launch
    for times in (2, 4, 8) if config.plan.processes is not None or world_size() == 1 else ():
        effect = f"{times} times as many GPUs, and a larger batch"
        if config.plan.processes is not None:
            yield {"plan.processes": str(times * config.plan.processes)}, effect
        elif times * launch.processes <= MACHINE:
            yield {"launch.processes": str(times * launch.processes)}, effect
        else:
            yield {"launch.nodes": str(times * node_range(config)[0])}, effect


def sharded_over_several(config: DictConfig, planner: Planner) -> list[dict[str, Any]]:
    """Suggest the smallest number of GPUs on which a run for a single GPU fits when sharded, with and without offload.

    This is the last suggestion, because the user may have only a single GPU.
    """
    changes = list(more_gpus(config))
    shards = [({"shard": "fsdp2"}, "divided over them"), ({"shard": "fsdp2_offload"}, "offloaded to CPU, slower")]
    by_shard = [[verified([change, shard], planner) for change in changes] for shard in shards]
    return [next(filter(None, fitting)) for fitting in by_shard if any(fitting)]


def library_of(sharding: Sharding) -> str:
    """Return the choice of `conf/shard` that divides everything, by the library that is in use."""
    return "zero3" if sharding.library == "deepspeed" else "fsdp2"


def onto_the_gpu(config: DictConfig) -> Iterator[Change]:
    """Yield the change that ends the offloading of a sharded policy, if it is offloaded."""
    sharding = sharding_of(config)
    if sharding.offload_weights or sharding.offload_optimizer:
        yield {"shard": library_of(sharding)}, "the same result, faster, nothing offloaded to CPU"


def sharding_changes(config: DictConfig) -> Iterator[Change]:
    """Yield shardings and offloads for several processes, then more processes."""
    sharding = sharding_of(config)
    if sharding.processes == 1:
        return
    name = library_of(sharding)
    divided = "the same algorithm, weights, gradients and optimizer state divided over the GPUs"
    if sharding.gathers_to_generate:
        yield {"train.ds3_gather_for_generation": "false"}, "the same result, slower generation"
    if sharding.stage < 3:
        yield {"shard": name}, divided
    if sharding.offload_weights or sharding.offload_optimizer:
        yield from onto_the_gpu(config)
    else:
        yield {"shard": f"{name}_offload"}, f"{divided}, and offloaded to CPU, slower"
    if sharding.library == "fsdp":
        yield {"shard": "zero3"}, "the same algorithm with DeepSpeed, which casts no weights while it loads"
    yield from more_gpus(config)


def harmless_first(config: DictConfig) -> Iterator[Change]:
    """Yield changes that make a run smaller, those that keep the result first."""
    yield from sharding_changes(config)
    yield from same_result(config)
    full, optimizer = config.peft is None, str(config.train.optim or DEFAULT_OPTIMIZER)
    saved = "optimizer state in 8 bits"
    if "adamw" in optimizer and "8bit" not in optimizer:
        yield {"train.optim": "adamw_8bit"}, saved
    if full and "adamw" in optimizer and not optimizer.startswith("paged_"):
        paged = "the same result, slower, optimizer state" if "8bit" in optimizer else saved
        yield {"train.optim": "paged_adamw_8bit"}, f"{paged} offloaded to CPU where the GPU is full"
    if config.model.dtype == "float32":
        half = "bfloat16" if config.gpu is None or config.gpu.bf16 else "float16"
        yield {"model.dtype": half}, "weights in half precision"
    yield from less_vision(config)
    if full:
        yield {"peft": "lora"}, "trains adapters instead of all weights"
    if full or not is_quantized(config.peft):
        yield {"peft": "qlora"}, "trains adapters on a base in 4 bits"
    length = config.train.max_completion_length // 2
    while length >= 128:
        yield {"train.max_completion_length": str(length)}, f"truncates completions at {length} tokens"
        length //= 2
    for name in other_models(config, larger=False):
        yield {"model": name}, "a smaller model"


def same_result(config: DictConfig) -> Iterator[Change]:
    """Yield changes that make a run of a single process smaller and keep its result."""
    train, update = config.train, config["update"]
    colocated = generator_of(train) == "colocated"
    if update.max_tokens_per_microbatch != "auto":
        yield {"update.max_tokens_per_microbatch": "auto"}, "the same result"
    if colocated and train.vllm_gpu_memory_utilization is not None:
        yield {"train.vllm_gpu_memory_utilization": "null"}, "the same result, vLLM takes the memory that is left"
    if colocated and train.vllm_enable_sleep_mode is False:
        yield {"train.vllm_enable_sleep_mode": "true"}, "the same result, vLLM wakes up for each generation"
    if not train.gradient_checkpointing:
        yield {"train.gradient_checkpointing": "true"}, "the same result, one more forward pass"
    if train.gradient_checkpointing and not update.activations_on_host:
        yield {"update.activations_on_host": "true"}, "the same result, layers' inputs offloaded to CPU"
    if not update.mlp_tile and not sharding_of(config).is_zero3:
        yield {"update.mlp_tile": "4096"}, "the same result, feed-forward layers once more in tiles"
    if colocated:
        yield {"generation": "transformers"}, "the same algorithm, slower generation"
    if config.peft is None and not update.gradients_on_host:
        yield {"update.gradients_on_host": "true"}, "the same result, slower, gradients offloaded to CPU"


def less_vision(config: DictConfig) -> Iterator[Change]:
    """Yield changes that make the images of a run cost less, if it has any."""
    tower = find_shape(config.model).vision
    if not (tower and config.task.images):
        return
    if config.peft is not None and config.peft.get("vision"):
        yield {"peft.vision": "false"}, "trains adapters on the language model alone"
    if config.peft is None and "vision" not in config.model.freeze:
        yield {"model.freeze": f"[{','.join(['vision', *config.model.freeze])}]"}, "the vision tower stays as it is"
    if not tower.image_size:
        largest = images.patches(tower, workload_of(config, "cuda")) * tower.patch_size**2
        for halvings in range(1, 4):
            yield {"task.max_pixels": str(largest >> halvings)}, "the policy sees images in less detail"


def better_uses(config: DictConfig, planner: Planner) -> list[dict[str, Any]]:
    """Return changes that use more of the GPU and still fit."""
    train = config.train
    changes = list(onto_the_gpu(config))
    if is_quantized(config.peft):
        changes.append(({"peft": "lora"}, "weights in half precision instead of 4 bits, faster"))
    changes += [({"model": name}, "a larger model") for name in other_models(config, larger=True)]
    if train.gradient_checkpointing:
        changes.append(({"train.gradient_checkpointing": "false"}, "the same result, one forward pass less"))
    if config.peft is not None:
        changes.append(({"peft": "none"}, "trains all weights instead of adapters"))
    return single_changes(changes, planner, MAX_SUGGESTIONS)


def other_models(config: DictConfig, larger: bool) -> list[str]:
    """Return the shipped models that are larger or smaller than the chosen model, its family first, then by size.

    They are vision-language models if the chosen model is one, otherwise text models.
    """
    chosen = find_shape(config.model)
    models = [
        (shape.model_type != chosen.model_type, -shape.parameters(), choice)
        for choice, (_, shape) in shipped_models().items()
        if shape.parameters() != chosen.parameters()
        and (shape.parameters() > chosen.parameters()) == larger
        and bool(shape.vision) == bool(chosen.vision)
    ]
    return [choice for _, _, choice in sorted(models)]
