"""Published measurements of memory and time, compared with the plan and the estimate for their settings.

`python -m benchmarks.published` reads the facts in `benchmarks/published.json`, plans each row, prints the tables, and
writes the file with the planned numbers and `docs/published.png`. The file's `complete` rows state all settings and the
meter; `ranges` have missing settings and are planned at both ends; `excluded` says which published numbers are in
neither; `time` has seconds per step.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from benchmarks.sft import Step, planned, with_unquantized_float32
from grpo.config import gpus
from grpo.config.schema import ROOT
from grpo.planning.duration import OFF_BY, speed_of_gpu, step_phases
from grpo.planning.fit import HEADROOM
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import peak, update
from grpo.planning.shape import Shape
from grpo.planning.workload import Adapter, Sharding, Workload
from grpo.utils.limits import GB

FILE = ROOT / "benchmarks" / "published.json"
NEAR = 0.15
"""Difference up to which a plan counts as near, as a fraction of the published number."""
Row = dict[str, Any]


def workload_of(settings: Row) -> Workload:
    """Return the workload that a row's settings describe: a batch of equal sequences, or a GRPO run with a `prompt`."""
    adapter = None
    if settings.get("rank"):
        modules = tuple(settings["modules"]) if "modules" in settings else None
        size, dropout = settings.get("adapter_bytes", 4), settings.get("dropout", False)
        casts = size > 2  # PEFT casts inputs to float32 adapters
        adapter = Adapter(settings["rank"], modules, size=size, dropout=dropout, casts=casts)
    prompt = settings.get("prompt", 0)
    completion = settings["completion"] if prompt else settings["length"]
    return Workload(
        prompt=prompt,
        completion=completion,
        sequences=settings["batch"],
        tokens=settings["batch"] * (prompt + completion),
        weight_bytes=settings.get("weight_bytes", 2),
        quantized=settings.get("bits", 0),
        double_quantized=settings.get("double_quantized", False),
        adapter=adapter,
        optimizer=settings.get("optimizer", "adamw_torch"),
        checkpointing=settings["checkpointing"],
        activations_on_host=settings.get("activations_on_host", False),
        reference=settings.get("reference", False),
        vllm_fraction=settings.get("vllm_fraction", 0.0),
        vllm_sleeps=settings.get("vllm_sleeps", False),
        gpu_memory=settings.get("gpu_memory_gib", 0.0) * GB,
        sharding=sharding_of(settings),
    )


def sharding_of(settings: Row) -> Sharding:
    """Return the division over processes that a row's settings describe."""
    shard, offload = settings.get("shard", ""), settings.get("offload", False)
    library = "deepspeed" if shard.startswith("zero") else shard
    return Sharding(
        library=library,
        stage={"": 0, "zero2": 2}.get(shard, 3),
        processes=settings.get("processes", 1),
        float32=settings.get("float32", library == "deepspeed"),
        offload_weights=offload,
        offload_optimizer=offload,
        bucket=None,
    )


def planned_gib(shape: Shape, settings: Row) -> float:
    """Return the planned peak of a row's settings on a GPU."""
    workload = workload_of(settings)
    if settings.get("loss") == "this trainer":  # a gradient alone, as PyTorch counts it
        parts = update(shape, workload)
        return sum(size for name, size in parts.items() if name not in ("context", "optimizer")) / GB
    if settings.get("prompt"):
        return peak(shape, workload) / GB
    if settings.get("untied"):  # LitGPT holds input and output embedding apart
        shape = replace(shape, tie_word_embeddings=False)
    names = Step.__dataclass_fields__.keys() & settings.keys()
    step = Step(shape, workload, **{name: settings[name] for name in names})
    if settings.get("upcast"):
        step = with_unquantized_float32(step)
    return sum(planned(step).values()) / GB


def estimated_seconds(shape: Shape, row: Row) -> float:
    """Return the estimated time of a step without generation on a row's GPU."""
    settings = row["settings"]
    profile = OmegaConf.create({"gpu": gpus.table()[row["gpu"]]})
    workload = replace(workload_of(settings), prompt=settings["length"], completion=0)
    train = SimpleNamespace(
        per_device_train_batch_size=settings["batch"],
        gradient_accumulation_steps=settings.get("accumulation", 1),
        num_iterations=1,
        use_vllm=False,
    )
    speed = speed_of_gpu(profile)
    assert speed, row["gpu"]
    return step_phases(cast(DictConfig, train), shape, workload, speed, settings["batch"])["update"]


def compared(content: Row) -> Row:
    """Return the facts with what is planned and estimated for them."""
    shapes = {name: shape_of(numbers) for name, numbers in content["models"].items()}
    for row in content["complete"]:
        gib = planned_gib(shapes[row["model"]], row["settings"] | {"meter": row["meter"]})
        row |= {"planned_gib": round(gib, 3), "difference": round(gib / row["claimed_gib"] - 1, 4)}
    for row in content["ranges"]:
        ends = [planned_gib(shapes[row["model"]], row["settings"] | row[end]) for end in ("low", "high")]
        row |= {
            "planned_gib": [round(end, 3) for end in ends],
            "inside": inside(row["kind"], row["claimed_gib"], *ends),
        }
    for row in content["time"]:
        seconds = estimated_seconds(shapes[row["model"]], row)
        row |= {"estimated_s": round(seconds, 3), "factor": round(seconds / row["published_s"], 3)}
    content["summary"] = summary(content)
    return content


def inside(kind: str, claimed: float, low: float, high: float) -> bool:
    """Return whether a claim is possible.

    A peak is in the range, a run that runs out of memory may exceed the GPU, and the longest run that fits a GPU may
    need its memory less the plan's headroom.
    """
    if kind == "exceeds":
        return claimed < high
    return low <= claimed and high >= claimed * (1 - HEADROOM if kind == "longest" else 1)


def summary(content: Row) -> Row:
    """Return the fractions and the rows by source."""
    near, total = by_source(content["complete"], lambda row: abs(row["difference"]) <= NEAR)
    held, ranges = by_source(content["ranges"], lambda row: row["inside"])
    covered, times = by_source(content["time"], lambda row: 1 / OFF_BY["cuda"] <= row["factor"] <= OFF_BY["cuda"])
    return {
        "within_15_percent": round(sum(near.values()) / sum(total.values()), 3),
        "complete": {source: [near[source], total[source]] for source in total},
        "ranges": {source: [held[source], ranges[source]] for source in ranges},
        "time": {source: [covered[source], times[source]] for source in times},
        "time factor": {
            kind: round(median(row["factor"] for row in content["time"] if row["settings"].get("layers") == kind), 2)
            for kind in ("compiled", "as they are")
        },
    }


def by_source(rows: list[Row], holds: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Return by source the number of rows for which something holds, and of all rows."""
    held: dict[str, int] = defaultdict(int)
    total: dict[str, int] = defaultdict(int)
    for row in rows:
        held[row["source"]] += bool(holds(row))
        total[row["source"]] += 1
    return held, total


def tables(content: Row) -> list[Table]:
    """Return the rows of each section as a table."""
    complete = Table("source", "model", "method", "setting", "claimed GiB", "planned GiB", "difference")
    for row in content["complete"]:
        settings = row["settings"]
        setting = f"{settings['batch']} x {settings['length']} {settings['loss']} {settings.get('shard', '')}"
        numbers = f"{row['claimed_gib']:.2f}", f"{row['planned_gib']:.2f}", f"{row['difference']:+.1%}"
        complete.add_row(row["source"], row["model"], row["method"], setting, *numbers)
    ranges = Table("source", "model", "claim", "planned GiB", "inside", "missing")
    for row in content["ranges"]:
        low, high = row["planned_gib"]
        span = f"{low:.1f} to {high:.1f}"
        missing = ", ".join(row["missing"])
        ranges.add_row(row["source"], row["model"], row["claim"], span, "yes" if row["inside"] else "no", missing)
    times = Table("source", "model", "row", "published s", "estimated s", "factor")
    for row in content["time"]:
        numbers = f"{row['published_s']:.2f}", f"{row['estimated_s']:.2f}", f"{row['factor']:.2f}"
        times.add_row(row["source"], row["model"], row["id"], *numbers)
    return [complete, ranges, times]


def draw(rows: list[Row], path: Path) -> None:
    """Draw planned against claimed memory by source, both axes logarithmic, with the band of 15 %."""
    figure = Figure(figsize=(6, 5.4), dpi=150)
    axes = figure.subplots()
    ends = [1.5, 100.0]
    axes.fill_between(ends, [(1 - NEAR) * end for end in ends], [(1 + NEAR) * end for end in ends], color="0.9")
    axes.plot(ends, ends, color="0.6", linewidth=1)
    for number, source in enumerate(dict.fromkeys(row["source"] for row in rows)):
        own = [row for row in rows if row["source"] == source]
        places = [row["claimed_gib"] for row in own], [row["planned_gib"] for row in own]
        axes.plot(*places, "osD^vP*X"[number % 8], markersize=5, alpha=0.75, label=f"{source} ({len(own)})")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="published, GiB", ylabel="planned, GiB")
    ticks = [2, 5, 10, 20, 50, 100]
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.set_yticks(ticks, list(map(str, ticks)))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Plan, print and write."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    content = compared(json.loads(FILE.read_text()))
    console = Console(width=160)
    for table in tables(content):
        console.print(table)
    console.print_json(data=content["summary"])
    lines = []
    for name, value in content.items():
        if isinstance(value, list):
            value = "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n ]"
        else:
            value = json.dumps(value, ensure_ascii=False)
        lines.append(f' "{name}": {value}')
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    draw(content["complete"], ROOT / "docs" / "published.png")


if __name__ == "__main__":
    main()
