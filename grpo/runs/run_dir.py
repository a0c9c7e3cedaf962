"""What a run has left in its directory, read for its page and for the table of its sweep."""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.config.schema import register
from grpo.errors import ConfigError
from grpo.runs.files import read_json
from grpo.runs.resume import NOT_ESSENTIAL, newest_checkpoint

PEAKS = ("memory/peak_reserved_gb", "memory/host_gb")
"""What a run's memory is told by: its GPU's, without one the host's."""


@dataclass(frozen=True)
class Run:
    """A run, whether it has been completed, was stopped, has failed or goes on."""

    folder: Path
    config: DictConfig
    overrides: list[str]
    """What was typed, without Hydra's own options."""
    options: list[str] = field(default_factory=list)
    """Of the command line, which say where the configuration was."""
    summary: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Rows of `metrics.jsonl`."""

    @property
    def status(self) -> str:
        """`completed`, `stopped`, `failed`, or `running` for one that has not said how it ended."""
        return self.summary.get("status", "running")

    @property
    def reason(self) -> str:
        """Why it has not been completed."""
        if self.status == "running":
            return "still running, or killed without a word"
        return self.summary.get("reason") or ""

    @property
    def judge(self) -> str:
        """The reward that says what is right."""
        return self.config.task.eval.reward

    @property
    def accuracy(self) -> float | None:
        """On held-out problems, after training."""
        return self.evaluation.get("after", {}).get("accuracy")

    @property
    def reward(self) -> float | None:
        """Mean reward over the last tenth of its steps."""
        rewards = [row["reward"] for row in self.metrics if row.get("reward") is not None]
        last = rewards[-max(1, len(rewards) // 10) :]
        return sum(last) / len(last) if last else None

    @property
    def seconds(self) -> float:
        """The time of all its steps, also of those before it was interrupted."""
        total, before = 0.0, 0
        for row in self.metrics:  # the time of a step is a mean over those since the last row
            total += (row.get("step_time") or 0.0) * (row["step"] - before)
            before = row["step"]
        return total

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of prompts and completions that it was trained on, by the time of its steps."""
        return self.metrics[-1].get("num_tokens", 0.0) / self.seconds if self.seconds else None

    @property
    def peak_gb(self) -> float | None:
        """Highest memory of the GPU, without one of the host."""
        return next((self.summary[name] for name in PEAKS if name in self.summary), None)

    @property
    def model(self) -> Path:
        """The result, or the newest checkpoint of a run that was stopped: weights, or an adapter.

        Raises:
            ConfigError: the run has left no weights.
        """
        model = self.folder / "model" if (self.folder / "model").is_dir() else newest_checkpoint(self.folder)
        if model is None:
            raise ConfigError(f"{self.folder}: the run has left neither a model nor a checkpoint")
        return model

    @property
    def command(self) -> str:
        """What runs it alone."""
        return shlex.join(["python", "-m", "grpo.train", *self.options, *self.overrides])


def read_run(folder: Path) -> Run:
    """Read a run directory.

    Raises:
        ConfigError: it is none.
    """
    file = folder / ".hydra" / "config.yaml"
    if not file.is_file():
        what = "neither a run nor a sweep is in it" if folder.is_dir() else "there is no such directory"
        raise ConfigError(f"{folder}: {what}; name a directory such as outputs/2026-01-01/12-00-00")
    register()
    config = OmegaConf.load(file)
    assert isinstance(config, DictConfig)
    return Run(
        folder=folder,
        config=config,
        overrides=typed_in(folder),
        options=options_in(folder),
        summary=read_json(folder / "summary.json"),
        evaluation=read_json(folder / "evaluation.json"),
        plan=read_json(folder / "plan.json"),
        metrics=read_metrics(folder / "metrics.jsonl"),
    )


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of metrics; none if there is no such file. A line that is cut off is left out."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


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
