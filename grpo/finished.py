"""What a run has left, for those who come after it: `grpo.evaluate`, `grpo.export` and `grpo.chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.config.schema import register
from grpo.errors import ConfigError
from grpo.resume import NOT_ESSENTIAL, newest_checkpoint
from grpo.summary import read_json

USAGE = "name a run directory, as outputs/2026-01-01/12-00-00"


@dataclass(frozen=True)
class FinishedRun:
    """A run directory, opened."""

    folder: Path
    config: DictConfig
    model: Path
    """The result, or the newest checkpoint of a run that was stopped: weights, or an adapter."""
    summary: dict[str, Any]
    """What `summary.json` holds; empty if the run never wrote it."""

    @property
    def overrides(self) -> list[str]:
        """What was typed, with the folders of configurations of one's own."""
        return typed_in(self.folder)

    @property
    def options(self) -> list[str]:
        """The options of the command line that say where its configuration was."""
        return options_in(self.folder)


def typed_in(folder: Path) -> list[str]:
    """Return what was typed for the run in a directory, without Hydra's own options and what it went on from."""
    typed = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text())
    return [text for text in typed if not NOT_ESSENTIAL.match(text)]


def options_in(folder: Path) -> list[str]:
    """Return `--config-dir` and `--config-name` as they were for the run in a directory."""
    file = folder / ".hydra" / "hydra.yaml"
    return options_of(yaml.safe_load(file.read_text())["hydra"]) if file.exists() else []


def options_of(hydra: Any) -> list[str]:
    """Return `--config-dir` and `--config-name` as they were for a run, from Hydra's own configuration of it."""
    sources = hydra["runtime"]["config_sources"]
    folders = [f"--config-dir={found['path']}" for found in sources if found["provider"] == "command-line"]
    name = hydra["job"]["config_name"]
    return folders if name == "config" else [*folders, f"--config-name={name}"]


def open_run(folder: str | Path) -> FinishedRun:
    """Open a run directory.

    Raises:
        ConfigError: it is none, or the run has left no weights.
    """
    folder = Path(folder)
    file = folder / ".hydra" / "config.yaml"
    if not file.is_file():
        what = "not a run directory (no .hydra/config.yaml)" if folder.is_dir() else "there is no such directory"
        raise ConfigError(f"{folder}: {what}; {USAGE}")
    model = folder / "model" if (folder / "model").is_dir() else newest_checkpoint(folder)
    if model is None:
        raise ConfigError(f"{folder}: the run has left neither a model nor a checkpoint")
    register()
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    return FinishedRun(folder, config, model, read_json(folder / "summary.json"))
