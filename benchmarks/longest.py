"""The longest completion that fits, for all GPU profiles, beside the claims of other trainers.

`python -m benchmarks.longest` plans for four minutes on any machine, prints both tables as Markdown, and writes
`benchmarks/longest.json` and `docs/longest.png`. Completions come in groups of 8 and transformers generates them.
"""

import json
from datetime import date
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from grpo.config import gpus
from grpo.config.schema import ROOT, register
from grpo.extras.plan_tables.longest import GENERATION, longest, methods
from grpo.planning.advice import Planner

FILE = Path(__file__).with_suffix(".json")
MODELS = {"Qwen2.5-3B": "qwen2_5_3b", "Qwen3-8B": "qwen3_8b", "Llama-3.1-8B": "llama3_1_8b"}
UNSLOTH_RL = "https://unsloth.ai/docs/get-started/reinforcement-learning-rl-guide/memory-efficient-rl"
UNSLOTH_LONG = "https://unsloth.ai/docs/new/grpo-long-context"
UNSLOTH_SFT = "https://unsloth.ai/docs/basics/unsloth-benchmarks"
CLAIMS: list[tuple[str, str, str, str, int, str]] = [
    # trainer, profile with as much memory, model of conf/model, method, tokens, source
    ("Unsloth, GRPO, Llama-3.1-8B", "h100", "llama3_1_8b", "QLoRA", 47500, UNSLOTH_RL),
    ("Unsloth, GRPO, Qwen3-32B (here Qwen2.5-32B)", "h100", "qwen2_5_32b", "LoRA", 6144, UNSLOTH_RL),
    ("Unsloth, GRPO, Qwen3-8B", "h100", "qwen3_8b", "QLoRA", 110000, UNSLOTH_LONG),
    *(
        (f"Unsloth, supervised, Llama-3.1-8B, {gib} GB", gpu, "llama3_1_8b", "QLoRA", tokens, UNSLOTH_SFT)
        for gib, gpu, tokens in (
            (12, "rtx3060", 21848),
            (16, "rtx3080", 40724),
            (24, "rtx4090", 78475),
            (40, "a100_40gb", 153977),
            (48, "l40s", 191728),
            (80, "h100", 342733),
        )
    ),
]


def main() -> None:
    """Plan all profiles and claims; print, draw and write them."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        names = [name for name, row in gpus.table().items() if row["name"] and name not in ("any", "apple")]
        classes: dict[float, list[str]] = {}
        for name in names:
            classes.setdefault(gpus.table()[name]["memory_gb"], []).append(name)
        rows = [
            {"memory_gb": memory, "profiles": same, "longest": lengths(with_bfloat16(same))}
            for memory, same in track(sorted(classes.items()), "planning", console=Console(stderr=True))
        ]
        claims = [beside(*facts) for facts in track(CLAIMS, "claims", console=Console(stderr=True))]
    content = {"date": str(date.today()), "completions": 8, "rows": rows, "claims": claims}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(as_markdown(content)))
    draw(content, ROOT / "docs" / "longest.png")


def with_bfloat16(profiles: list[str]) -> str:
    """Return the first of some profiles whose GPU computes in bfloat16."""
    return next(name for name in profiles if gpus.table()[name]["bf16"])


def lengths(profile: str) -> dict[str, dict[str, int | None]]:
    """Return the longest completion by model and method on the GPU of a profile, tokens."""
    found: dict[str, dict[str, int | None]] = {}
    for title, model in MODELS.items():
        planner = planner_of(profile, model)
        found[title] = {
            method: longest(planner, {**change, **GENERATION["transformers"]})
            for method, change in methods(planner.config({})).items()
        }
    return found


def planner_of(profile: str, model: str) -> Planner:
    """Return what plans a model on the GPU of a profile, in groups of 8."""
    return Planner([f"+gpu={profile}", f"model={model}", "train.num_generations=8"])


def beside(title: str, profile: str, model: str, method: str, tokens: int, source: str) -> dict[str, Any]:
    """Return a claim beside the plan of the same GPU, model and method, offloaded."""
    planner = planner_of(profile, model)
    ours = longest(planner, {**methods(planner.config({}))[f"{method}, offloaded"], **GENERATION["transformers"]})
    return {"claim": title, "profile": profile, "method": method, "tokens": tokens, "planned": ours, "source": source}


def as_markdown(content: dict[str, Any]) -> list[str]:
    """Return the tables of the documentation."""
    lines = [f"| GiB | `+gpu=` | {' | '.join(MODELS)} |", "|---|---|" + "---|" * len(MODELS)]
    for row in content["rows"]:
        cells = [
            " / ".join(short(row["longest"][title][f"{method}, offloaded"]) for method in ("full", "LoRA", "QLoRA"))
            for title in MODELS
        ]
        profiles = ", ".join(f"`{name}`" for name in row["profiles"])
        lines.append(f"| {row['memory_gb']:g} | {profiles} | {' | '.join(cells)} |")
    lines += ["", "| claim | method | claimed | planned here |", "|---|---|---|---|"]
    for one in content["claims"]:
        claim = f"[{one['claim']}]({one['source']})"
        lines.append(f"| {claim} | {one['method']} | {one['tokens']:,} | {one['planned']:,} |")
    return lines


def short(tokens: int | None) -> str:
    """Return a number of tokens in thousands."""
    return "refused" if tokens is None else f"{tokens / 1000:.0f}k" if tokens else "–"


def draw(content: dict[str, Any], path: Path) -> None:
    """Draw the longest completion over the GPU's memory, a line per method, a panel per model, and the claims."""
    figure = Figure(figsize=(11, 3.8))
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (title, model) in zip(panels, MODELS.items(), strict=True):
        for place, method in enumerate(("full", "LoRA", "QLoRA")):
            for suffix, style in (("", "--"), (", offloaded", "-")):
                points = [(row["memory_gb"], row["longest"][title][method + suffix]) for row in content["rows"]]
                x, y = zip(*[point for point in points if point[1]], strict=True)
                axes.plot(x, y, style, color=f"C{place}", label=method + suffix, marker=".", linewidth=1.2)
        own = [facts for facts in CLAIMS if facts[2] == model]
        if own:
            memory = [gpus.table()[facts[1]]["memory_gb"] for facts in own]
            axes.scatter(memory, [facts[4] for facts in own], marker="x", color="black", label="claims", zorder=3)
        axes.set(xscale="log", yscale="log", title=title, xlabel="GiB of the GPU")
        axes.set_xticks([12, 24, 48, 96, 192], ["12", "24", "48", "96", "192"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("longest completion, tokens")
    panels[-1].legend(fontsize=7, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
