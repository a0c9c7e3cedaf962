"""Reading the directory of a run, for its page and for the table of its sweep."""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.config.batch import completions
from grpo.config.folders import config_flags
from grpo.config.library import BUILDERS, DEFAULT_OPTIMIZER, suffix_of
from grpo.config.mixture import single_tasks
from grpo.config.schema import register
from grpo.rundir.files import RESOLVED_CONFIG, read, read_json, read_lines
from grpo.rundir.resume import newest_checkpoint
from grpo.utils.errors import ConfigError

OF_A_START = re.compile(
    r"[+~]*(hydra[./]|train\.resume_from_checkpoint=|launch\.(rendezvous|timeout|max_restarts)=|sweep\.resume=)"
)
"""Overrides of a command line that are Hydra's own, or may change with each start."""
PEAKS = ("memory/peak_reserved_gb", "memory/host_gb")
"""Keys of the peak memory in `summary.json`: of the GPU, or of the host for a run without a GPU."""
BY_TRL = "frac_reward_zero_std"
"""TRL's count of zero-variance groups, of the run and, with `/<task>`, of a task."""
READS = re.compile(r"\boc\.|\$\{[^:}]*\$\{")
"""Interpolations by a function of OmegaConf's, or by one whose name is interpolated."""


@dataclass(frozen=True)
class Run:
    """A run, as its directory shows it: completed, stopped, failed or still running."""

    folder: Path
    """Run directory."""
    config: DictConfig
    """Configuration that was run."""
    overrides: list[str]
    """Overrides of the command line, without Hydra's own options and the checkpoint that it resumed."""
    config_flags: list[str] = field(default_factory=list)
    """`--config-dir` and `--config-name` with which its files are found from here."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Content of `summary.json`."""
    evaluation: dict[str, Any] = field(default_factory=dict)
    """Content of `evaluation.json`."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Content of `plan.json`."""
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Lines of `metrics.jsonl`, one per logged step."""

    @property
    def status(self) -> str:
        """`completed`, `stopped`, `failed`, or `running` for a run without a summary."""
        return self.summary.get("status", "running")

    @property
    def reason(self) -> str:
        """Why the run has not been completed; empty if it has."""
        if self.status == "running":
            return "still running, or killed without a summary"
        return self.summary.get("reason") or ""

    @property
    def tasks(self) -> dict[str, DictConfig]:
        """Tasks by their names; a single task has an empty name."""
        return single_tasks(self.config.task)

    @property
    def completions_a_step(self) -> int:
        """Completions of a step, of all processes; of one where no summary says how many there were."""
        return self.summary.get("completions_a_step", completions(self.config.train, 1))

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""
        return self.config.train.optim or DEFAULT_OPTIMIZER

    @property
    def grader(self) -> str:
        """Name of the reward that decides which completions are correct."""
        return self.config.task.eval.reward

    @property
    def accuracy(self) -> float | None:
        """Accuracy on held-out problems after training."""
        return self.evaluation.get("after", {}).get("accuracy")

    @property
    def reward(self) -> float | None:
        """Mean reward over the last tenth of the logged steps."""
        logged = [row.get("rollout/reward", row.get("reward")) for row in self.metrics]
        rewards = [reward for reward in logged if reward is not None]
        last = rewards[-max(1, len(rewards) // 10) :]
        return sum(last) / len(last) if last else None

    @property
    def seconds(self) -> float:
        """Time of all steps, seconds, also of those before an interruption."""
        total, before = 0.0, 0
        for row in self.metrics:  # `step_time` is the mean over the steps since the last row
            total += (row.get("step_time") or 0.0) * (row["step"] - before)
            before = row["step"]
        return total

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of prompts and completions per second of the steps."""
        tokens = max((row.get("num_tokens") or 0.0 for row in self.metrics), default=0.0)
        return tokens / self.seconds if self.seconds else None

    @property
    def peak_gb(self) -> float | None:
        """Peak memory of the GPU, or of the host for a run without a GPU, GiB."""
        return next((self.summary[name] for name in PEAKS if name in self.summary), None)

    @property
    def model(self) -> Path:
        """Folder of the weights or the adapter: the result, or the newest checkpoint of a run without a result.

        Raises:
            ConfigError: the run has left no weights.
        """
        model = self.folder / "model" if (self.folder / "model").is_dir() else newest_checkpoint(self.folder)
        if model is None:
            raise ConfigError(f"{self.folder}: the run has left neither a model nor a checkpoint")
        return model

    @property
    def command(self) -> str:
        """Command line that reproduces the run, or a job of a sweep as a run of its own; that of a script."""
        if "command" in self.summary:
            return self.summary["command"]
        count = OmegaConf.select(self.config, "launch.processes", default=1)  # which torchrun may have decided
        named = count == 1 or any(text.startswith("launch.processes=") for text in self.overrides)
        processes = [] if named else [f"launch.processes={count}"]
        return shlex.join(["python", "-m", "grpo.train", *self.config_flags, *self.overrides, *processes])


def data_of(task: Any) -> str:
    """Return the data set of a task: its name on the hub, its generator, or the names of its files without folders."""
    path, files = str(task.dataset.get("path") or ""), task.dataset.get("data_files")
    if files or (path and (Path(path).exists() or suffix_of(path) in BUILDERS)):
        named = files.values() if hasattr(files, "values") else [files or path]
        return ", ".join(Path(str(file)).name for file in named)
    return path or str(task.dataset.get("generator"))


def is_run(folder: Path) -> bool:
    """Return whether a folder is the directory of a run, of an evaluation or of a forecast."""
    return (folder / ".hydra" / "config.yaml").is_file()


def read_run(folder: Path) -> Run:
    """Read a run directory; ConfigError if the folder holds no run."""
    file = folder / ".hydra" / "config.yaml"
    if not is_run(folder):
        problem = "neither a run nor a sweep is in it" if folder.is_dir() else "there is no such directory"
        raise ConfigError(f"{folder}: {problem}; name a directory such as outputs/2026-01-01/12-00-00")
    if (folder / "preflight.json").is_file():
        raise ConfigError(f"{folder}: a preflight, no run; its page is report.html, and preflight.json has its content")
    register()
    resolved, hydra = folder / RESOLVED_CONFIG, folder / ".hydra" / "hydra.yaml"
    typed = read(folder / ".hydra" / "overrides.yaml", yaml.safe_load) or []
    composed = read(hydra, yaml.safe_load)
    stored = read(resolved, yaml.safe_load) or read(file, yaml.safe_load)
    if not isinstance(stored, dict):
        raise ConfigError(f"{folder}: its configuration is torn, {resolved.name} and {file.name}")
    config = OmegaConf.create(literal(stored))
    return Run(
        folder=folder,
        config=config,
        overrides=[text for text in typed if not OF_A_START.match(text)],
        config_flags=config_flags(composed["hydra"]) if composed else [],
        summary=read_json(folder / "summary.json"),
        evaluation=read_json(folder / "evaluation.json"),
        plan=read_json(folder / "plan.json"),
        metrics=[with_zero_variance(row) for row in read_lines(folder / "metrics.jsonl")],
    )


def with_zero_variance(row: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step; where an earlier version has not counted zero-variance groups, TRL's count."""
    by_trl = {name: value for name, value in row.items() if name.startswith(BY_TRL)}
    return {name.replace(BY_TRL, "rollout/zero_variance"): value for name, value in by_trl.items()} | row


def literal(value: Any) -> Any:
    """Return a stored configuration in which references that read the environment or others' text are text.

    Secrets are stored as such references, and a reader's environment is none of the run's.
    """
    if isinstance(value, dict):
        return {name: literal(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    return re.sub(r"\\*\$\{", r"\\${", value) if isinstance(value, str) and READS.search(value) else value
