"""Folders with configurations of the user: of `--config-dir`, of GRPO_CONFIG_DIR, and `./conf`."""

import os
from itertools import product
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from grpo.config.schema import ROOT
from grpo.utils.errors import ConfigError
from grpo.utils.spoken import shown

VARIABLE = "GRPO_CONFIG_DIR"
"""Environment variable: a folder with groups, as for `--config-dir`."""
WITHOUT_FLAG = "found"
"""Provider of `./conf` and GRPO_CONFIG_DIR in Hydra's list of sources."""
PROVIDERS = ("command-line", WITHOUT_FLAG, "hydra.searchpath in command-line")
"""Providers of a user's folders."""


def config_folders() -> list[Path]:
    """Return the folders that are found without `--config-dir`: GRPO_CONFIG_DIR takes precedence over `./conf`.

    Raises:
        ConfigError: GRPO_CONFIG_DIR is no directory.
    """
    named = os.environ.get(VARIABLE)
    if named and not Path(named).is_dir():
        raise ConfigError(f"{VARIABLE}={named}: there is no such directory; correct it, or unset {VARIABLE}")
    folders = [Path(os.path.abspath(folder)) for folder in (named, "conf") if folder and Path(folder).is_dir()]
    return [folder for folder in dict.fromkeys(folders) if not folder.samefile(ROOT / "conf")]


def config_flags(hydra: Any) -> list[str]:
    """Return the words with which a command line that is typed here has the folders and the `--config-name` of a run.

    Args:
        hydra: Hydra's own configuration of the run.
    """
    here = [str(folder) for folder in config_folders()]
    sources = [source for source in hydra["runtime"]["config_sources"] if source["provider"] in PROVIDERS]
    folders = [s["path"] for s in sources if s["provider"] != WITHOUT_FLAG or s["path"] not in here]
    flags = [f"--config-dir={folder}" for folder in folders[:1]]  # of which Hydra reads one
    if (name := hydra["job"]["config_name"]) != "config":
        flags.append(f"--config-name={name}")
    if folders[1:]:
        further = (QuotedString(f"file://{folder}", Quote.single).with_quotes() for folder in folders[1:])
        flags.append(f"hydra.searchpath=[{','.join(further)}]")
    return flags


def check_names(config: DictConfig) -> None:
    """Raise a ConfigError if a chosen file of the user is not used, because this project has one of the same name."""
    choices = [(group.partition("@")[0], choice) for group, choice in config.hydra.runtime.choices.items()]
    choices += [("reward", name) for name in config.reward]  # of which a command line chooses several
    folders = [source.path for source in config.hydra.runtime.config_sources if source.provider in PROVIDERS]
    for folder, (group, choice) in product(folders, choices):
        file, used = (Path(root, group, f"{choice}.yaml") for root in (folder, ROOT / "conf"))
        if file.is_file() and used.is_file() and file.read_bytes() != used.read_bytes():
            raise ConfigError(f"{shown(file)}: {group}={choice} is a choice of this project; rename the file")
