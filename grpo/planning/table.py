"""Models x methods for one GPU, with one completion at a time: `python -m grpo.plan plan.table=true`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from grpo.planning.advice import Planner
from grpo.planning.fit import HEADROOM
from grpo.planning.machine import machine_for
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB

MODELS = {
    "0.5B": "qwen2_5_0_5b",
    "1B": "llama3_2_1b",
    "3B": "llama3_2_3b",
    "8B": "llama3_1_8b",
    "14B": "qwen2_5_14b",
}
FULL = {"peft": "none", "train.gradient_checkpointing": "false", "train.optim": "adamw_torch_fused"}
CHECKPOINTED = {**FULL, "train.optim": "adamw_8bit", "train.gradient_checkpointing": "true"}
METHODS: dict[str, dict[str, str]] = {
    "full": FULL,
    "+ 8-bit AdamW": {**FULL, "train.optim": "adamw_8bit"},
    "+ checkpointing": CHECKPOINTED,
    "+ gradients offloaded to CPU": {**CHECKPOINTED, "update.gradients_on_host": "true"},
    "+ paged AdamW": {**CHECKPOINTED, "update.gradients_on_host": "true", "train.optim": "paged_adamw_8bit"},
    "LoRA": {**CHECKPOINTED, "peft": "lora"},
    "QLoRA": {**CHECKPOINTED, "peft": "qlora"},
}
LEAST = {"update.max_tokens_per_microbatch": "1"}  # one sequence per micro-batch


def models_by_methods(overrides: Sequence[str], run_dir: Path, as_json: bool) -> None:
    """Print the table, or its JSON, and write `plan.json` and `plan.png`; ConfigError if no cell can be planned."""
    cells = plan_cells(overrides)
    content = json.dumps(cells, indent=2)
    (run_dir / "plan.json").write_text(content + "\n")
    draw(cells, run_dir / "plan.png")
    if as_json:
        print(content)
        return
    console = Console()
    console.print(as_text(cells))
    console.print(f"models: {', '.join(MODELS.values())}", highlight=False, soft_wrap=True)
    console.print("at least: with one completion at a time, generated and in a micro-batch", highlight=False)
    console.print(f"red: more than {1 - HEADROOM:.0%} of {cells['capacity_gb']:.1f} GiB", highlight=False)
    console.print(f"{run_dir / 'plan.png'}", highlight=False, soft_wrap=True)


def plan_cells(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the least peak by method (rows) and model (columns), GiB; None if the two exclude each other."""
    # the table chooses these itself
    planner = Planner([word for word in overrides if not word.lstrip("+~").startswith(("model", "peft"))])
    machine = planner.machine = machine_for(planner.config({}))
    rows: dict[str, dict[str, float | None]] = {}
    for method, change in track(METHODS.items(), "planning", console=Console(stderr=True), transient=True):
        if machine.device == "mps" and method in ("+ checkpointing", "LoRA", "QLoRA"):
            change = {**change, "train.optim": "adamw_torch"}  # of bitsandbytes' a Mac has none
        rows[method] = {}
        for size, model in MODELS.items():
            plan = planner.plan({**change, **LEAST, "model": model}, least=True)
            rows[method][size] = plan.peak_gb if plan else None
    if not any(any(row.values()) for row in rows.values()):
        raise ConfigError("plan.table: no cell can be planned with this command line; try it without plan.table")
    return {"device": machine.name, "capacity_gb": machine.capacity / GB, "peak_gb": rows}


def as_text(cells: dict[str, Any]) -> Table:
    """Return the table for the terminal."""
    title = f"{cells['device']}, GiB at least"
    table = Table("", *(Column(size, justify="right") for size in MODELS), title=title, title_justify="left")
    limit = (1 - HEADROOM) * cells["capacity_gb"]
    for method, row in cells["peak_gb"].items():
        texts = ["" if peak is None else f"{peak:.1f}" for peak in row.values()]
        fits = [peak is None or peak <= limit for peak in row.values()]
        table.add_row(method, *(text if fit else f"[red]{text}[/]" for text, fit in zip(texts, fits, strict=True)))
    return table


def draw(cells: dict[str, Any], path: Path) -> None:
    """Draw the table: runs that fit in green, the darker the fuller the GPU; the others in red."""
    capacity, rows = cells["capacity_gb"], cells["peak_gb"]
    figure = Figure(figsize=(7, 0.5 * len(rows) + 1.2))
    axes = figure.subplots()
    fractions = [[(peak or 0.0) / capacity for peak in row.values()] for row in rows.values()]
    fits = 1 - HEADROOM
    colours = [
        [(1 - 0.55 * s, 1 - 0.25 * s, 1 - 0.6 * s) if s <= fits else (0.93, 0.6, 0.55) for s in r] for r in fractions
    ]
    axes.imshow(colours, aspect="auto")
    for y, row in enumerate(rows.values()):
        for x, peak in enumerate(row.values()):
            axes.text(x, y, "" if peak is None else f"{peak:.1f}", ha="center", va="center")
    axes.set_xticks(range(len(MODELS)), list(MODELS))
    axes.set_yticks(range(len(rows)), list(rows))
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    title = f"GiB at least, on {cells['device']}, {capacity:.1f} GiB; red does not fit"
    axes.set_title(title, fontsize=10, pad=12)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
