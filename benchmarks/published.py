"""Published measurements of memory and time, and the plan for their settings.

`python -m benchmarks.published` reads the facts in `benchmarks/published.json`, plans each row, prints tables, and
writes the file again with the planned numbers, and `docs/published.png`.
"""

import json
from dataclasses import replace
from typing import Any

from benchmarks.sft import Step, planned, with_unquantized_float32
from grpo.planning.shape import Shape, shape_of
from grpo.planning.workload import Adapter, Sharding, Workload
from grpo.utils.limits import GB


def step_of(shape: Shape, settings: dict[str, Any], metered_by: str) -> Step:
    """Return the step that a row's settings describe."""
    adapter = None
    if settings.get("rank"):
        modules = tuple(settings["modules"]) if "modules" in settings else None
        dropout = settings.get("dropout", False)
        adapter = Adapter(settings["rank"], modules, size=settings["adapter_bytes"], dropout=dropout)
    workload = Workload(
        prompt=0,
        completion=settings["length"],
        sequences=settings["batch"],
        tokens=settings["batch"] * settings["length"],
        weight_bytes=settings.get("weight_bytes", 2),
        quantized=settings.get("bits", 0),
        double_quantized=settings.get("double_quantized", False),
        adapter=adapter,
        optimizer=settings["optimizer"],
        checkpointing=settings["checkpointing"],
        sharding=sharding_of(settings),
    )
    if settings.get("untied"):  # LitGPT holds input and output embedding twice
        shape = replace(shape, tie_word_embeddings=False)
    names = Step.__dataclass_fields__.keys() & settings.keys()
    step = Step(shape, workload, meter=metered_by, **{name: settings[name] for name in names})
    return with_unquantized_float32(step) if settings.get("upcast") else step


def sharding_of(settings: dict[str, Any]) -> Sharding:
    """Return the division over processes that a row's settings describe."""
    processes, shard = settings.get("processes", 1), settings.get("shard", "")
    library = "deepspeed" if shard.startswith("zero") else shard
    offload = settings.get("offload", False)
    return Sharding(
        library,
        {"": 0, "fsdp": 3}.get(shard) if not shard.startswith("zero") else int(shard[-1]),
        processes,
        settings.get("float32", library == "deepspeed"),
        offload,
        offload,
        bucket=None,
    )
