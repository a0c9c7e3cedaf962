"""Callbacks of a run: metrics file, mismatch warning, signals, guards of disk and host memory."""

import inspect
import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from transformers import TrainerCallback, TrainerState

from grpo.rundir.files import read_lines, write_lines
from grpo.rundir.set_aside import set_aside
from grpo.utils.diagnosis import MISMATCH, mismatch_causes
from grpo.utils.distributed import any_of, is_main_process
from grpo.utils.errors import ConfigError, DirectoryLost
from grpo.utils.hardware import host_memory
from grpo.utils.limits import GB, HOST_LIMIT
from grpo.utils.spoken import shown
from grpo.utils.terminal import on_signals, say
from rewards.isolation.loader import load

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def configured(callbacks: DictConfig, **parts: Any) -> list[TrainerCallback]:
    """Return the callbacks of the configuration; a function that has nothing to do returns None.

    Args:
        parts: of the run; a function gets those that it has arguments for.

    Raises:
        ConfigError: one cannot be loaded or called, or returns something else.
    """
    added: list[TrainerCallback] = []
    for key, options in callbacks.items():
        name = f"callbacks.{key!s}"
        try:
            function = load(options["fn"], f"{name}.fn", "grpo.callbacks")
            arguments = inspect.signature(function).parameters
            taken = {part: value for part, value in parts.items() if part in arguments}
            callback = function(**{**options.get("kwargs", {})} | taken)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error) if name in str(error) else f"{name}: {error}") from error
        if not isinstance(callback, TrainerCallback | None):
            raise ConfigError(f"{name}: {options['fn']} returns a {type(callback).__name__}, no TrainerCallback")
        added += [callback] if callback else []
    return added


class MetricsFile(TrainerCallback):
    """Write `metrics.jsonl`: one object a logged step, TRL's names unchanged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.path.exists():  # a continued run repeats steps after its checkpoint
            write_lines(self.path, [row for row in read_lines(self.path) if row["step"] <= state.global_step])

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or not logs.keys() & {"reward", "engine/is_policy"}:
            return
        row = {"step": state.global_step, **logs}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


class SetAside(TrainerCallback):
    """Set aside what is of later steps than the one that a run continues from."""

    def __init__(self, run_dir: Path, console: Console) -> None:
        self.run_dir, self.console = run_dir, console

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and (folder := set_aside(self.run_dir, state.global_step, state.max_steps)):
            text = f"results after step {state.global_step} of an earlier start are in {shown(folder)}"
            log.warning("%s", text)
            self.console.print(text, soft_wrap=True)


class MismatchWarning(TrainerCallback):
    """Warn, once, where vLLM's log-probabilities are not those of the policy.

    TRL compares them only with `vllm_importance_sampling_correction`.
    """

    METRIC = "sampling/sampling_logp_difference/mean"

    def __init__(self, console: Console, train: DictConfig) -> None:
        self.console, self.train = console, train
        self.warned = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        difference = (logs or {}).get(self.METRIC, 0.0)
        if not (difference <= MISMATCH or self.warned):
            self.warned = True
            finding = f"step {state.global_step}: vLLM's log-probabilities differ from the policy's by {difference:.2f}"
            text = f"{finding} nats per token; likely causes: {'; '.join(mismatch_causes(self.train))}"
            log.warning("%s", text)
            if state.is_world_process_zero:
                self.console.print(text, style="yellow", soft_wrap=True)


class StopOnSignal(TrainerCallback):
    """On Ctrl-C, SIGTERM or SIGHUP finish the step, save a checkpoint and stop; a second Ctrl-C stops at once.

    A second SIGTERM does not: schedulers send one to a process and to the one that started it, which passes it on.
    Outside of the training a signal raises `KeyboardInterrupt` at once, with what was being done. One that is ignored,
    as by `nohup`, stays ignored.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.activity: str | None = "loading"
        """Name of the phase that a signal interrupts; None while steps are trained."""
        self.before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopOnSignal":
        self.before = on_signals(SIGNALS, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def begin(self, activity: str | None) -> None:
        """Begin something that a signal interrupts at once; None for training.

        Raises:
            KeyboardInterrupt: there has been a signal.
        """
        self.activity = activity
        if activity and self.received:
            raise KeyboardInterrupt(f"{self.received} before {activity}")

    def _note(self, number: int, frame: FrameType | None) -> None:
        first, self.received = not self.received, self.received or signal.Signals(number).name
        if self.activity and first:
            raise KeyboardInterrupt(f"{self.received} while {self.activity}")
        if first and is_main_process():
            say(f"{self.received}: stopping after this step, with a checkpoint; Ctrl-C stops at once")
        if not first and number == signal.SIGINT:
            raise KeyboardInterrupt("interrupted at once, without a checkpoint of the last steps")

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if any_of(bool(self.received)):  # all stop, or none
            self.received = self.received or "a signal to another process"
            control.should_save = control.should_training_stop = True


class WhenSharded(TrainerCallback):
    """Evaluates the policy before the first step, once training has sharded it: nothing can be generated earlier."""

    def __init__(self, stop: StopOnSignal, evaluate: Callable[[], None]) -> None:
        self.stop, self.evaluate = stop, evaluate

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.stop.begin("evaluating before the training")
        self.evaluate()
        self.stop.begin(None)


class DiskGuard(TrainerCallback):
    """Fail if the run directory has been removed, and warn in time if the next checkpoint may not fit on its disk."""

    def __init__(self, run_dir: Path, console: Console) -> None:
        self.run_dir, self.console = run_dir, console
        self.folder = os.open(run_dir, os.O_RDONLY)  # while it is open its number is not given to another folder
        self.checkpoint_bytes: int | None = None
        """Size of the last checkpoint, until the warning."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        name = shown(self.run_dir)
        try:
            same = os.path.samestat(self.run_dir.stat(), os.fstat(self.folder))
        except FileNotFoundError:
            same = False
        if not same:
            raise DirectoryLost(f"failed: the run directory {name} has been removed or replaced, and its checkpoints")
        free = shutil.disk_usage(self.run_dir).free
        if self.checkpoint_bytes and free < self.checkpoint_bytes:
            needs = f"a checkpoint needs {self.checkpoint_bytes / GB:.3g} GiB and {free / GB:.3g} GiB are free"
            text = f"step {state.global_step}: {needs} for {name}: make room before the next"
            log.warning("%s", text)
            self.console.print(text, style="yellow", soft_wrap=True)
            self.checkpoint_bytes = None

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            files = (self.run_dir / f"checkpoint-{state.global_step}").rglob("*")
            self.checkpoint_bytes = sum(file.stat().st_size for file in files if file.is_file())


class HostMemoryGuard(TrainerCallback):
    """When host memory is nearly used up, save a checkpoint and stop, instead of being killed without one.

    Args:
        limit_gb: stop as if there were only so much; None takes what the machine or its control group has.
    """

    def __init__(self, limit_gb: float | None = None) -> None:
        self.limit_gb = limit_gb
        self.reason: str | None = None

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        used, limit = (size / GB for size in host_memory())
        limit = self.limit_gb or limit
        if any_of(used > HOST_LIMIT * limit):  # all stop, or none
            self.reason = (
                f"host memory nearly used up after step {state.global_step}: {used:.1f} GiB of {limit:.1f} GiB, by all "
                "processes in total; close others, offload less, or raise the limit of the container"
            )
            control.should_save = control.should_training_stop = True
