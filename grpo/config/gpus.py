"""The table of GPUs, `gpus.json`: facts by their makers, and the profile that the GPU of this machine resembles.

Each row is a choice of `gpu` with the choices of `conf/gpu/any.yaml`, which reads the row by `${gpu:column}`; a profile
that chooses more than a model has a file in `conf/gpu`. Columns: `memory_gb` (GiB, as PyTorch reports it, or the
maker's GB), `bandwidth_gb_s` (10^9 bytes/s), `tflops` (dense products in bfloat16, on a GPU without it in float16,
with sums in float32, 10^12 operations/s), `compute` (NVIDIA's compute capability, or AMD's LLVM target), `formats`
(numbers of 8 and 4 bits that its matrix units multiply; the trainer uses none), `shared` (memory of CPU and GPU
together), `model` (a choice of `conf/model`), `source` (the maker's page), `note` (how a number follows from the page).
"""

import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from grpo.utils.distributed import is_launched
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB, working_set
from grpo.utils.local_gpu import LocalGpu, local_gpu, local_vendor

PROFILES = Path(__file__).resolve().parents[2] / "conf" / "gpu"
IN_ANY_NAME = {"nvidia", "geforce", "tesla", "amd", "radeon", "gpu", "graphics"}
"""Words that name no GPU."""
FORMS = {"sxm2", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e", "vf", "workstation", "edition"}
"""Words of a driver that a row of the table omits."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the rows of the table by the name of their profile."""
    return json.loads(Path(__file__).with_name("gpus.json").read_text())


def register() -> None:
    """Register the profiles, and the resolvers `${gpu:column}`, a fact of `gpu.profile`, and `${model_for_gpu:}`."""
    for name, row in table().items():
        if not (PROFILES / f"{name}.yaml").exists():
            node = {"defaults": ["any", {"override /model": row["model"]}], "gpu": {"profile": name}}
            ConfigStore.instance().store(name, node, group="gpu", package="_global_", provider="grpo")
    OmegaConf.register_new_resolver("gpu", fact, replace=True)
    OmegaConf.register_new_resolver("model_for_gpu", lambda: model_for(gpu_here(several=False)), replace=True)


def fact(column: str, *, _root_: DictConfig) -> Any:
    """Return a fact of the GPU of a configuration; of `optimizer` the one that suits it.

    Raises:
        ConfigError: there is no such row, or for `auto` no GPU.
    """
    row = row_of(str(_root_.gpu.profile), several=_root_.launch.processes != 1 or is_launched())
    if column == "optimizer":
        return "adamw_torch" if row["vendor"] == "apple" else "adamw_8bit"
    return row.get(column)


def row_of(profile: str, several: bool = False) -> dict[str, Any]:
    """Return a row of the table; of `auto`, `any` and `apple` with the facts of this machine.

    Args:
        several: whether several GPUs of this machine train.

    Raises:
        ConfigError: there is no such row, or for `auto` no GPU.
    """
    if profile == "auto":
        return automatic(gpu_here(several))
    if profile not in table():
        raise ConfigError(f"gpu.profile={profile}: not in grpo/config/gpus.json; possible: auto, {', '.join(table())}")
    row = table()[profile]
    if profile == "any":
        return row | {"vendor": local_vendor()}
    if profile == "apple" and local_vendor() == "apple":
        return row | {"memory_gb": psutil.virtual_memory().total / GB}
    return row


@cache
def gpu_here(several: bool) -> LocalGpu:
    """Return the GPU of this machine.

    Raises:
        ConfigError: there is none.
    """
    if gpu := local_gpu(several):
        return gpu
    raise ConfigError(
        "+gpu=auto: no GPU was found here; leave it out to train on the CPU, or name a GPU of another machine to plan "
        "for it, as in `python -m grpo.plan +gpu=h100`"
    )


def automatic(gpu: LocalGpu) -> dict[str, Any]:
    """Return a row for the GPU of this machine: its own memory, and of the table what is known of it."""
    profile = resembled(gpu)
    row, same = table()[profile], is_same(gpu, table()[profile])
    facts = {"name": gpu.name, "vendor": gpu.vendor, "memory_gb": round(gpu.memory / GB, 2), "shared": gpu.shared}
    facts |= {"bf16": gpu.bf16} | ({} if same else {"tflops": None, "bandwidth_gb_s": None})
    compute = f" ({gpu.compute})" if gpu.compute else ""
    line = f"{gpu.name}{compute} with {gpu.memory / GB:.1f} GiB"
    line += f" is +gpu={profile}" if same else f" resembles +gpu={profile} ({row['name']}, {row['memory_gb']:g} GiB)"
    line += "; a slice of a GPU, planned by its own memory" if gpu.is_slice else ""
    if gpu.count > 1:
        line += f"; one of {gpu.count} GPUs is used: launch.processes=auto uses all" if not gpu.several else ""
    return row | facts | {"found": line}


def resembled(gpu: LocalGpu) -> str:
    """Return the nearest profile: by name among GPUs of the same architecture, else by architecture and memory."""
    rows = {name: row for name, row in table().items() if row["vendor"] == gpu.vendor and name != "any"}
    named = words(gpu.name)

    def distance(name: str) -> tuple[float, ...]:
        row = rows[name]
        theirs = words(row["name"])
        numbers = {word for word in named & theirs if re.search(r"\d", word)}
        by_name = len(named & theirs) / len(named | theirs) if numbers and row["compute"] == gpu.compute else 0.0
        by_memory = abs(math.log(gpu.memory / GB / row["memory_gb"]))
        return (-by_name, apart(gpu.compute, row["compute"]), by_memory)

    return min(rows, key=distance)


def apart(value: str, other: str) -> float:
    """Return how far two architectures are apart: compute capabilities by their numbers, others by being different."""
    try:
        return abs(float(value) - float(other))
    except ValueError:
        return float(value != other)


def is_same(gpu: LocalGpu, row: dict[str, Any]) -> bool:
    """Whether a GPU is that of a row: by its name and, within 10 %, its memory."""
    more, fewer = words(gpu.name) - words(row["name"]), words(row["name"]) - words(gpu.name)
    alike = not more - FORMS and all(re.fullmatch(r"\d+gb", word) for word in fewer)
    return alike and gpu.vendor != "apple" and 0.9 <= gpu.memory / GB / row["memory_gb"] <= 1.1


def words(name: str) -> set[str]:
    """Return the words of a GPU's name that tell it from others."""
    return set(re.split(r"[\s-]+", name.lower())) - IN_ANY_NAME


def model_for(gpu: LocalGpu) -> str:
    """Return a choice of `conf/model`: that of the GPU's own profile, else of the largest that its memory holds."""
    profile = resembled(gpu)
    if not is_same(gpu, table()[profile]):
        usable = working_set(gpu.memory / GB) if gpu.vendor == "apple" else gpu.memory / GB
        fitting = [
            (row["memory_gb"], row["compute"] == gpu.compute, name)
            for name, row in table().items()
            if row["vendor"] != "apple" and row["memory_gb"] <= 1.05 * usable
        ]
        profile = max(fitting, default=(0, False, "any"))[-1]
    return table()[profile]["model"]
