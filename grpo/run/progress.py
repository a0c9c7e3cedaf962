"""The progress of a run on the terminal, in two lines; in a file or a pipe a line now and then."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback, TrainerState

from grpo.utils.device import memory_of_gpu
from grpo.utils.hardware import host_memory
from grpo.utils.limits import GB
from rewards.isolation.reward import Reward

WEEK = 7 * 24 * 3600.0
"""Seconds of the past from which the time left is estimated: of all steps that rich keeps, up to 1000."""
GAP = "  "


class Readings:
    """A line of readings: the first one, and those of the others for which the terminal is wide enough."""

    def __init__(self) -> None:
        self.texts: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = "".join(self.texts[:1])
        for text in self.texts[1:]:
            if len(line) + len(GAP) + len(text) <= options.max_width:
                line += GAP + text
        yield Text(line, no_wrap=True, overflow="ellipsis")


class TwoLines(Progress):
    """A bar with step and time left, and a line of readings below."""

    def __init__(self, console: Console) -> None:
        self.readings = Readings()
        super().__init__(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            speed_estimate_period=WEEK,  # by default half a minute, less than a step may take
            redirect_stdout=False,  # what the libraries print goes to the log
            redirect_stderr=False,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        return self.make_tasks_table(self.tasks), self.readings


class ProgressBar(TrainerCallback):
    """Show step, reward, accuracy, step time, time left and memory; without a terminal, as a line per logged step.

    A context, after which the terminal is as before, however the training ended.

    Args:
        accuracy: the metric that is the fraction of correct completions, where it is logged.
        rewards: whose errors are shown.
        host_gb: host memory that the run may use, GiB; None takes that of the machine or its control group.
    """

    def __init__(
        self,
        console: Console,
        accuracy: str = "rewards/correctness/mean",
        rewards: Sequence[Reward] = (),
        host_gb: float | None = None,
    ) -> None:
        self.console, self.accuracy, self.rewards, self.host_gb = console, accuracy, rewards, host_gb
        self.bar = TwoLines(console) if console.is_terminal and not console.is_dumb_terminal else None

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar:
            self.bar.stop()

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.bar:
            self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)
            self.bar.start()

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.bar:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        readings, errors = self.readings(logs), sum(reward.errors.total() for reward in self.rewards)
        others = [f"{logs['rollout/problems']:.0f} problems"] if "rollout/problems" in logs else []
        failed = [f"reward errors {errors}"] if errors else []
        if self.bar:  # what is most important first, for a narrow terminal
            self.bar.readings.texts = [*readings[:-1], *failed, readings[-1], memory(logs, self.host_gb), *others]
        else:
            line = GAP.join([f"step {state.global_step}/{state.max_steps}", *readings, *others, *failed])
            self.console.print(line, soft_wrap=True)

    def readings(self, logs: dict[str, Any]) -> list[str]:
        """Return reward, accuracy and seconds per step, each as text."""
        generated = "rollout/" if "rollout/reward" in logs else ""  # all completions, not those trained on alone
        reward = logs[f"{generated}reward"]  # None where no completion had one
        texts = ["reward none" if reward is None else f"reward {reward:.2f}"]
        accuracy = logs.get(f"{generated}{self.accuracy}")
        if accuracy is not None and reward is not None:  # without any reward it says nothing
            texts.append(f"accuracy {100 * accuracy:.0f} %")
        return [*texts, f"{logs.get('step_time', 0):.2f} s/step"]

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.bar:
            self.bar.stop()


def memory(logs: dict[str, Any], host_gb: float | None = None) -> str:
    """Return the memory in use and that which may be used, as text.

    It is that of the GPU, the most that PyTorch has reserved since the last log, or host memory without a GPU.
    """
    if "memory/peak_reserved_gb" in logs:
        used = logs["memory/peak_reserved_gb"]
        limit = memory_of_gpu() / GB
    else:
        used, limit = (size / GB for size in host_memory())
        limit = host_gb or limit
    return f"memory {used:.1f}/{limit:.1f} GiB"
