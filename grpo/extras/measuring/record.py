"""The file of measurements: what it says of the machine, and its schema."""

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pynvml
from jsonschema import Draft202012Validator

from grpo.extras.measuring.cases import Case
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import free_gpu_memory, gpus_of_driver
from grpo.utils.limits import GB

SCHEMA: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text())
METERS = {"cuda": "PyTorch's allocator", "cpu": "MemTracker"}
"""Name of the meter, by device."""


def slug(device: str) -> str:
    """Return a device's name for a file: lower case, words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def machine(device: str) -> dict[str, Any]:
    """Return everything that the file says of this machine: GPU, memory in GiB, driver and versions of libraries."""
    gpu = free_gpu_memory() if device == "cuda" else None
    return {
        "schema": 1,
        "device": gpu[0] if gpu else "cpu",
        "memory_gb": round(gpu[1] / GB, 2) if gpu else None,
        "driver": pynvml.nvmlSystemGetDriverVersion() if gpu and gpus_of_driver() else None,
        "meter": METERS[device],
        "versions": {name: installed(name) for name in SCHEMA["properties"]["versions"]["required"]},
    }


def installed(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def as_row(case: Case, result: dict[str, Any]) -> dict[str, Any]:
    """Return what the file says of a case."""
    numbers = ("model", "layers", "method", "prompt", "completion", "completions")
    row = {name: getattr(case, name) for name in numbers}
    return row | {"overrides": list(case.overrides), "planned_gb": dict(case.planned)} | result


def read_record(file: Path) -> dict[str, Any]:
    """Return the content of a file of measurements.

    Raises:
        ConfigError: it is not JSON, or breaks the schema; the message has the place.
    """
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: broken JSON, {error}") from error
    wrong = min(Draft202012Validator(SCHEMA).iter_errors(content), key=lambda fault: len(fault.path), default=None)
    if wrong:
        place = ".".join(map(str, wrong.absolute_path)) or "the file"
        raise ConfigError(f"{file}: {place}: {wrong.message}")
    return content
