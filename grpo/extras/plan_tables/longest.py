"""The longest completion that fits, by method and generation: `python -m grpo.plan plan.longest=true`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from grpo.extras.plan_tables.table import CHECKPOINTED
from grpo.planning.advice import Planner
from grpo.planning.from_config import find_shape
from grpo.planning.machine import machine_for
from grpo.planning.sharding import sharding_of
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB
from grpo.utils.terminal import plain_console

LENGTH = "train.max_completion_length"
STEP = 256
"""Lengths are multiples of so many tokens."""
MOST = 2**22
"""Tokens beyond which no length is tried."""
GENERATION: dict[str, dict[str, str]] = {
    "transformers": {"generation": "transformers"},
    "vLLM asleep in updates": {"generation": "vllm_colocate", "train.vllm_enable_sleep_mode": "true"},
    "vLLM awake": {"generation": "vllm_colocate", "train.vllm_enable_sleep_mode": "false"},
}
CHOSEN = ("peft", "generation", LENGTH, "plan.longest")
"""Beginnings of the overrides that the table chooses itself."""


def show(content: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(as_text(content))
    console.print(
        f"{content['completions']} completions per group; the longest one is computed alone where more do not fit",
    )
    for method, words in content["offloaded"].items():
        console.print(f"{method}: {' '.join(words)}", soft_wrap=True)
    if limit := content["max_position_embeddings"]:
        console.print(f"the model was made for at most {limit:,} tokens with the prompt")


def methods(config: DictConfig) -> dict[str, dict[str, str]]:
    """Return the settings of each method, plain and offloaded, as far as the processes of a configuration allow it.

    Offloaded are activations, with tiles in the feed-forward layers except under ZeRO-3, and in full fine-tuning by one
    process gradients and optimizer state. The optimizer is otherwise that of the configuration.
    """
    sharding = sharding_of(config)
    offloaded = {"update.activations_on_host": "true"} | ({} if sharding.is_zero3 else {"update.mlp_tile": "4096"})
    alone = {"update.gradients_on_host": "true", "train.optim": "paged_adamw_8bit"} if sharding.processes == 1 else {}
    settings: dict[str, dict[str, str]] = {}
    for method, peft, extra in (("full", "none", alone), ("LoRA", "lora", {}), ("QLoRA", "qlora", {})):
        settings[method] = {**CHECKPOINTED, "peft": peft}
        settings[f"{method}, offloaded"] = {**CHECKPOINTED, "peft": peft, **offloaded, **extra}
    return settings


def longest_completions(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the longest completion, tokens, of each method and generation; None if these exclude each other.

    Raises:
        ConfigError: nothing can be planned.
    """
    planner = Planner([word for word in overrides if not word.lstrip("+~").startswith(CHOSEN)])
    config = planner.config({})
    machine = planner.machine = machine_for(config)
    chosen = methods(config)
    rows: dict[str, dict[str, int | None]] = {}
    for method, change in track(chosen.items(), "planning", console=plain_console(stderr=True), transient=True):
        rows[method] = {name: longest(planner, {**change, **engine}) for name, engine in GENERATION.items()}
    if not any(any(length is not None for length in row.values()) for row in rows.values()):
        raise ConfigError("plan.longest: nothing can be planned with this command line; try it without plan.longest")
    return {
        "model": config.model.model_name_or_path,
        "device": machine.name,
        "capacity_gb": machine.capacity / GB,
        "prompt": config.task.max_prompt_length,
        "completions": config.train.num_generations,
        "max_position_embeddings": find_shape(config.model).max_position_embeddings,
        "offloaded": {
            method: [f"{key}={value}" for key, value in change.items() if key not in CHECKPOINTED]
            for method, change in chosen.items()
            if method.endswith("offloaded")
        },
        "longest": rows,
    }


def longest(planner: Planner, change: dict[str, str]) -> int | None:
    """Return the longest completion that fits, tokens; 0 if none does, None if the settings exclude each other."""

    def fits(steps: int) -> bool:
        plan = planner.plan({**change, LENGTH: str(steps * STEP)})
        return plan is not None and plan.problem is None

    if planner.plan({**change, LENGTH: str(STEP)}) is None:
        return None
    low, high = 0, 1  # `low` fits, `high` does not
    while high * STEP <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


def as_text(content: dict[str, Any]) -> Table:
    """Return the table for the terminal."""
    title = f"{content['model']} on {content['device']}, {content['capacity_gb']:.1f} GiB: longest completion, tokens"
    table = Table("", *(Column(name, justify="right") for name in GENERATION), title=title, title_justify="left")
    for method, row in content["longest"].items():
        table.add_row(method, *("" if length is None else f"{length:,}" for length in row.values()))
    return table


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw a bar per method and generation."""
    rows = content["longest"]
    figure = Figure(figsize=(8, 0.75 * len(rows) + 1))
    axes = figure.subplots()
    height = 0.8 / len(GENERATION)
    for place, name in enumerate(GENERATION):
        lengths = [row[name] or 0 for row in rows.values()]
        bars = axes.barh([y + place * height for y in range(len(rows))], lengths, 0.9 * height, label=name)
        axes.bar_label(bars, [f"{length:,}" if length else "" for length in lengths], padding=3, fontsize=8)
    if limit := content["max_position_embeddings"]:
        axes.axvline(limit - content["prompt"], color="grey", linestyle=":", label="the model's own limit")
    axes.set_yticks([y + height for y in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(f"longest completion, tokens: {content['model']}\non {content['device']}", fontsize=10, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
