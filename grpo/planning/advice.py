"""What to change in a run that does not fit, or that wastes its card; each piece of advice has been planned again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra import compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.config.check import check
from grpo.config.library import DEFAULT_OPTIMIZER
from grpo.config.schema import ROOT
from grpo.errors import ConfigError
from grpo.planning.fit import Plan, make_plan
from grpo.planning.from_config import find_shape, shipped_models
from grpo.planning.machine import Machine, machine_for

MOST = 4
"""Suggestions that are shown."""
WASTE = 0.5
"""A run that uses less of its card than this could do more with it."""
Change = tuple[dict[str, str], str]
"""Overrides, and what they do to the result."""


class Planner:
    """Plans variants of one command line."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.overrides = list(overrides)
        self.machine: Machine | None = None
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def config(self, change: dict[str, str]) -> DictConfig:
        """Compose the command line with other overrides; choices of groups need Hydra, values do not."""
        groups = {key: value for key, value in change.items() if (ROOT / "conf" / key).is_dir()}
        line = (*self.overrides, *(f"{key}={value}" for key, value in groups.items()))  # the last of a key counts
        if line not in self.composed:
            self.composed[line] = compose("config", list(line))
        config = self.composed[line].copy()
        for key, value in change.items():
            if key not in groups:
                OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
        return config

    def plan(self, change: dict[str, str]) -> Plan | None:
        """Plan with other overrides; None if they do not go together."""
        try:
            config = self.config(change)
            check(config)
            self.machine = self.machine or machine_for(config)
            return make_plan(config, self.machine)
        except (ConfigError, HydraException, OmegaConfBaseException):
            return None


def advise(overrides: Sequence[str], config: DictConfig, plan: Plan) -> list[dict[str, Any]]:
    """Return what to add to a command line whose run does not fit or wastes its card, least harm to the result first.

    Args:
        overrides: of the command line. Hydra has to be initialized.
        config: what they compose to.
        plan: of that.
    """
    if not plan.problem and (plan.unified or plan.peak_gb >= WASTE * plan.capacity_gb):
        return []
    planner = Planner(overrides)
    found = remedies(config, planner.plan) if plan.problem else uses(config, planner.plan)
    typed = {word.lstrip("+~").split("=")[0].split(".")[0] for word in overrides if "." in word.split("=")[0]}
    # another choice of a group would not replace the keys of it that were typed
    return [
        advice for advice in found if not typed & {"model", "peft"} & {w.split("=")[0] for w in advice["overrides"]}
    ]


def remedies(config: DictConfig, plan: Callable[[dict[str, str]], Plan | None]) -> list[dict[str, Any]]:
    """Return changes that make a run fit: the least that do together, then those that do alone."""
    changes = list(harmless_first(config))
    together: list[Change] = []
    found: list[dict[str, Any]] = []
    for change in changes:
        together.append(change)
        if suggestion := verified(together, plan):
            for needless in together[:-1]:  # what came before may no longer be needed
                fewer = [kept for kept in together if kept is not needless]
                if shorter := verified(fewer, plan):
                    together, suggestion = fewer, shorter
            found.append(suggestion)
            break
    found += alone(changes, plan, MOST - len(found), besides=found)
    return found


def alone(
    changes: Sequence[Change],
    plan: Callable[[dict[str, str]], Plan | None],
    most: int,
    besides: Sequence[dict[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the changes with which the run fits, one at a time, the first for each key."""
    found: dict[str, dict[str, Any]] = {}
    for change in changes:
        (key,) = change[0]
        if len(found) < most and key not in found and (suggestion := verified([change], plan)):
            found[key] = suggestion
    return [suggestion for suggestion in found.values() if suggestion not in besides]


def verified(changes: Sequence[Change], plan: Callable[[dict[str, str]], Plan | None]) -> dict[str, Any] | None:
    """Return changes as a suggestion if the run fits with them, else None."""
    overrides: dict[str, str] = {}
    for change, _ in changes:
        overrides |= change
    planned = plan(overrides)
    if planned is None or planned.problem:
        return None
    effects = [effect for change, effect in changes if change.items() <= overrides.items()]
    words = [f"{key}={value}" for key, value in overrides.items()]
    return {"overrides": words, "effect": "; ".join(effects), "peak_gb": planned.peak_gb}


def harmless_first(config: DictConfig) -> Iterator[Change]:
    """Yield what can make a run smaller, beginning with what leaves the result as it is."""
    train, update, peft = config.train, config["update"], config.peft
    full, optimizer = peft is None, str(train.optim or DEFAULT_OPTIMIZER)
    adamw = "adamw" in optimizer
    colocated = train.use_vllm and train.vllm_mode == "colocate"
    saved = "optimizer state in 8 bits"
    paged = "the same result, slower, optimizer state" if "8bit" in optimizer else saved
    half = "bfloat16" if config.gpu is None or config.gpu.bf16 else "float16"
    lengths = [train.max_completion_length >> halvings for halvings in range(1, 13)]
    for applies, key, value, effect in (
        (update.max_tokens_per_microbatch != "auto", "update.max_tokens_per_microbatch", "auto", "the same result"),
        (
            colocated and train.vllm_gpu_memory_utilization is not None,
            "train.vllm_gpu_memory_utilization",
            "null",
            "the same result, vLLM takes what is left",
        ),
        (
            colocated and train.vllm_enable_sleep_mode is False,
            "train.vllm_enable_sleep_mode",
            "true",
            "the same result, vLLM wakes up for each generation",
        ),
        (
            not train.gradient_checkpointing,
            "train.gradient_checkpointing",
            "true",
            "the same result, one more forward pass",
        ),
        (colocated, "generation", "transformers", "the same algorithm, slower generation"),
        (
            full and not update.gradients_on_host,
            "update.gradients_on_host",
            "true",
            "the same result, slower, gradients in host memory",
        ),
        (adamw and "8bit" not in optimizer, "train.optim", "adamw_8bit", saved),
        (
            full and adamw and not optimizer.startswith("paged_"),
            "train.optim",
            "paged_adamw_8bit",
            f"{paged} in host memory where the card is full",
        ),
        (config.model.dtype == "float32", "model.dtype", half, "weights in half precision"),
        (full, "peft", "lora", "trains adapters instead of all weights"),
        (full or not peft.get("quantization"), "peft", "qlora", "trains adapters on a base in 4 bits"),
        *(
            (length >= 128, "train.max_completion_length", str(length), f"cuts completions after {length} tokens")
            for length in lengths
        ),
        *((True, "model", name, "a smaller model") for name in other_models(config, larger=False)),
    ):
        if applies:
            yield {key: value}, effect


def uses(config: DictConfig, plan: Callable[[dict[str, str]], Plan | None]) -> list[dict[str, Any]]:
    """Return changes that put an idle card to use and still fit."""
    train, peft = config.train, config.peft
    changes: list[Change] = []
    if peft is not None and peft.get("quantization"):
        changes.append(({"peft": "lora"}, "weights in half precision instead of 4 bits, faster"))
    changes += [({"model": name}, "a larger model") for name in other_models(config, larger=True)]
    if train.gradient_checkpointing:
        changes.append(({"train.gradient_checkpointing": "false"}, "the same result, a forward pass less"))
    if peft is not None:
        changes.append(({"peft": "none"}, "trains all weights instead of adapters"))
    return alone(changes, plan, MOST)


def other_models(config: DictConfig, larger: bool) -> list[str]:
    """Return the shipped models that are larger or smaller than the chosen one, its family first, then by size."""
    here = find_shape(config.model)
    models = [
        (shape.model_type != here.model_type, -shape.parameters(), choice)
        for choice, (_, shape) in shipped_models().items()
        if shape.parameters() != here.parameters() and (shape.parameters() > here.parameters()) == larger
    ]
    return [choice for _, _, choice in sorted(models)]
