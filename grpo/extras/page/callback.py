"""The page of a script: `trainer.add_callback(grpo.Page())` makes `args.output_dir` the directory of a run."""

import contextlib
import logging
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo.config.secrets import is_secret
from grpo.reporting.page import write_report
from grpo.run.callbacks import MetricsFile
from grpo.run.live_page import LivePage
from grpo.rundir.files import write_json
from grpo.rundir.lock import take
from grpo.rundir.versions import versions
from grpo.utils.errors import ConfigError

log = logging.getLogger(__name__)
REWARD, MEAN = "rewards/", "/mean"
"""Beginning and end of the name of a reward's metric."""


def without_secrets(words: list[str]) -> list[str]:
    """Return the words of a command line, `--name value` and `name=value`, with an ellipsis for each secret."""
    shown = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=") if "=" in word else (before, "", word)
        secret = is_secret(name.strip("-") if equals or before.startswith("-") else "", value)
        shown.append((f"{name}=…" if equals else "…") if secret else word)
    return shown


class Page(TrainerCallback):
    """Writes the metrics and the page of a training with TRL's GRPOTrainer, or with ours, into `args.output_dir`.

    Completions are on it with `GRPOConfig(log_completions=True)`. Rank 0 writes. The page is written while the training
    runs, as that of a run, and at its end; after an exception the page stays the last one that was written.

    Args:
        grader: name of the reward function that gives 1 to a correct completion; without it the page has no accuracy.
        task: name of the task, for the heading.
    """

    def __init__(self, grader: str | None = None, task: str = "") -> None:
        self.grader, self.task = grader, task
        self.begun = time.monotonic()
        self.metrics: MetricsFile | None = None
        self.live: LivePage | None = None
        self.summary: dict[str, Any] | None = None
        """Content of `summary.json`, from the first logged step on."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ConfigError):  # so that the table of runs knows that it is running
            take(folder)
        self.begun, self.summary = time.monotonic(), None
        self.metrics, self.live = MetricsFile(folder / "metrics.jsonl"), LivePage(folder)
        self.metrics.on_train_begin(args, state, control)
        self.live.on_train_begin(args, state, control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if self.metrics is None or self.live is None or not logs or "reward" not in logs:
            return
        self.metrics.on_log(args, state, control, logs)
        if self.summary is None:  # before a page reads it
            config = Path(args.output_dir) / ".hydra" / "config.yaml"
            config.write_text(yaml.safe_dump(self.configuration(args, logs, model)), encoding="utf-8")
            self.summary = {"reason": None, "task": self.task, "command": shlex.join(without_secrets(sys.orig_argv))}
            self.summary["completions_a_step"] = getattr(args, "generation_batch_size", None)
            write_json(Path(args.output_dir) / "summary.json", self.summary | {"status": "running"})
        self.live.on_log(args, state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.live is None or self.summary is None:
            return
        folder, ended = Path(args.output_dir), state.global_step >= state.max_steps
        self.live.end()
        self.summary |= {"status": "completed" if ended else "stopped", "steps": state.global_step}
        self.summary |= {"wall_time_s": round(time.monotonic() - self.begun, 1), "versions": versions()}
        write_json(folder / "summary.json", self.summary)
        try:
            write_report(folder)
        except Exception:  # the training is what counts
            log.exception("no page could be written")

    def configuration(self, args: TrainingArguments, logs: dict[str, Any], model: Any) -> dict[str, Any]:
        """Return the configuration of a run that its page reads, of a script's trainer."""
        names = [name[len(REWARD) : -len(MEAN)] for name in logs if name.startswith(REWARD) and name.endswith(MEAN)]
        weights = getattr(args, "reward_weights", None) or [1.0] * len(names)
        adapter = next(iter(getattr(model, "peft_config", {}).values()), None)
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or "model"
        plain = {key: value for key, value in args.to_dict().items() if isinstance(value, int | float | str | None)}
        values = {key: value for key, value in plain.items() if not is_secret(key, value)}
        return {
            "model": {
                "model_name_or_path": str(name),
                "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
            },
            "task": {"dataset": {"script": self.task or "of the script"}, "eval": {"reward": self.grader}},
            "reward": {
                name: {"fn": name, "weight": weight, "kwargs": {}} for name, weight in zip(names, weights, strict=False)
            },
            "peft": {"r": adapter.r} if adapter else None,
            "train": values,
            "rollout": {"dynamic_sampling": False},
        }
