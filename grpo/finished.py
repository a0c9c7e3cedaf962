"""What a run has left, for those who come after it: `grpo.evaluate`, `grpo.export` and `grpo.chat`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.config import ConfigError, register
from grpo.resume import newest_checkpoint
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
        typed = yaml.safe_load((self.folder / ".hydra" / "overrides.yaml").read_text())
        return [text for text in typed if not text.lstrip("+").startswith(("hydra.", "train.resume_from_checkpoint"))]

    @property
    def config_dirs(self) -> list[str]:
        """Folders that were named with `--config-dir`."""
        sources = yaml.safe_load((self.folder / ".hydra" / "hydra.yaml").read_text())["hydra"]["runtime"]
        return [found["path"] for found in sources["config_sources"] if found["provider"] == "command-line"]


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
