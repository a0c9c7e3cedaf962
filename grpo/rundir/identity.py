"""The identity of a run, or of a sweep: the configuration that was composed, compared as data."""

from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.rundir.files import read

NOT_OF_A_RUN = ("hydra", "sweep")
"""Groups that say where and how a run is started."""
OF_A_START = {"train": ("resume_from_checkpoint",), "launch": ("rendezvous", "timeout", "max_restarts")}
"""Keys by group that may change with each start: where the run continues, and how its processes meet and end."""
NAMED_BY_USERS = ("reward", "peft")
"""Groups without a fixed set of keys; elsewhere a key of only one of two runs is of another version."""
MOVED = {
    "grpo.generation.vllm_engine.": "grpo.generation.vllm.engine.",
    "grpo.environments.": "grpo.extras.environments.",
}
"""Modules whose functions and classes a configuration names, as earlier versions called them."""
Identity = dict[str, Any]


def identity(config: DictConfig) -> Identity:
    """Return what was composed as plain data; references to the machine and the environment are not resolved."""
    return without_start(yaml.safe_load(OmegaConf.to_yaml(config)))


def read_identity(run_dir: Path) -> Identity:
    """Return the identity of the run in a directory; an empty one, as of no run, if it cannot be read."""
    composed = read(run_dir / ".hydra" / "config.yaml", parsed)
    return without_start(composed) if isinstance(composed, dict) else {}


def parsed(text: str) -> Any:
    """Return a composed configuration as data, with the modules of today."""
    for before, now in MOVED.items():
        text = text.replace(before, now)
    return yaml.safe_load(text)


def without_start(composed: dict[str, Any]) -> Identity:
    """Return a composed configuration without the keys that may change with each start."""
    groups = {name: group for name, group in composed.items() if name not in NOT_OF_A_RUN}
    for name, keys in OF_A_START.items():
        groups[name] = {key: value for key, value in groups[name].items() if key not in keys}
    return groups


def is_same(run: Identity, other: Identity) -> bool:
    """Return whether two identities are of one run, perhaps begun by another version of this project."""
    return bool(run) and all(
        same_group(run[name], other[name], name in NAMED_BY_USERS) for name in run.keys() & other.keys()
    )


def same_group(group: Any, other: Any, all_keys: bool) -> bool:
    """Return whether two groups are equal: in all of their keys, or in those that both have."""
    if all_keys or not (isinstance(group, dict) and isinstance(other, dict)):
        return group == other
    return all(group[key] == other[key] for key in group.keys() & other.keys())
