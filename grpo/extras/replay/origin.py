"""The origin of a run: versions, device, threads, configuration, reward functions."""

import hashlib
import importlib.util
import json
import platform
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo.rundir.files import RESOLVED_CONFIG, read
from grpo.rundir.versions import git_commit, versions
from grpo.utils.errors import ConfigError

Origin = dict[str, Any]
ORIGIN = "origin.json"
ROUNDS = ("versions", "device", "processor", "threads", "processes", "tf32")
"""Keys on which rounding depends."""
LONGEST = 60
"""Characters of a value in a line."""


def origin_of(trainer: Any) -> Origin:
    """Return what computes the steps of a trainer."""
    device = trainer.accelerator.device
    config = read(Path(trainer.args.output_dir) / RESOLVED_CONFIG, yaml.safe_load) or {}
    return {
        "versions": {**versions(), "python": platform.python_version()},
        "commit": git_commit(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": trainer.accelerator.num_processes,
        "max_steps": trainer.state.max_steps,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "rewards": {name: source_digest(options["fn"]) for name, options in config.get("reward", {}).items()},
        "config": config,
    }


def read_origin(folder: Path) -> Origin:
    """Return the origin of the records in a folder.

    Raises:
        ConfigError: it is missing or torn.
    """
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ORIGIN}: missing or torn; without it the records cannot be used") from error
    return origin


def source_digest(fn: str) -> str | None:
    """Return a digest of the file of a reward function; None if there is no such file."""
    place, _, _ = fn.rpartition(":" if ":" in fn else ".")
    if not place.endswith(".py"):
        spec = importlib.util.find_spec(place) if place else None
        place = spec.origin if spec and spec.origin else ""
    file = Path(place)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else None


def differences(before: Origin, now: Origin) -> list[str]:
    """Return lines that say in what two origins differ."""
    flat, other = flattened(before), flattened(now)
    names = dict.fromkeys([*flat, *other])
    return [
        f"{name.removeprefix('config.')}: {shown(flat.get(name))} then, {shown(other.get(name))} now"
        for name in names
        if flat.get(name) != other.get(name)
    ]


def rounds_otherwise(before: Origin, now: Origin) -> bool:
    """Return whether versions, device, threads or processes differ, so that sums may be rounded otherwise."""
    return any(before.get(name) != now.get(name) for name in ROUNDS)


def shown(value: Any) -> str:
    """Return a value for a line of text."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def flattened(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dots in the names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
