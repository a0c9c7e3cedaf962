"""The arithmetic of a batch: processes, slices, completions, groups."""

import math
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from grpo.utils.distributed import world_size
from grpo.utils.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


SLICES = ("gradient_accumulation_steps", "steps_per_generation")
"""Keys of `train` with the number of slices of a process, of `per_device_train_batch_size` completions each."""


def keep_batch(train: "DictConfig", before: int, now: int) -> list[str]:
    """Give `now` processes as many slices in total as `before` had; return the changes as overrides."""
    for key in (changed := [key for key in SLICES if train[key]]):
        train[key] = train[key] * before // now
    return [f"train.{key}={train[key]}" for key in changed]


def node_range(config: "DictConfig") -> tuple[int, int]:
    """Return the least and the largest number of machines, equal unless `launch.nodes` is a range such as 2:4.

    Raises:
        ConfigError: it is neither a number nor a range.
    """
    text = str(config.launch.nodes)
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(number or match[1]) for number in match.groups()) if match else (0, 0)
    if not 1 <= least <= most:
        raise ConfigError(f"launch.nodes={text}: a positive number of machines, or the least and the most, as in 2:4")
    return least, most


def processes(config: "DictConfig") -> int:
    """Return how many processes train: as planned for, as `torchrun` started them, or as `launch` will start them.

    Of a range of machines it starts the least at first.
    """
    if config.plan.processes is not None:
        return config.plan.processes
    return config.launch.processes * node_range(config)[0] if world_size() == 1 else world_size()


def check_groups(train: "DictConfig", processes: int | None = None) -> None:
    """Check that a generation batch holds whole groups of `num_generations` completions."""
    generations = train.num_generations
    if generations is None or generations < 2:
        raise ConfigError(
            f"train.num_generations={generations}: the advantage compares the completions of a group, so a group "
            "needs at least 2; 4 to 16 is usual"
        )
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if train[key] < 1:
            raise ConfigError(f"train.{key}={train[key]}: at least 1")
    batch = completions(train, processes)
    if batch % generations == 0:
        return
    fitting = sorted((n for n in range(2, batch + 1) if batch % n == 0), key=lambda n: abs(n - generations))
    advice = {"num_generations": sorted(fitting[:4])}
    if not train.generation_batch_size:
        size = train.per_device_train_batch_size
        step = generations // math.gcd(generations, batch // size)
        advice["per_device_train_batch_size"] = [n for n in (size // step * step, (size // step + 1) * step) if n]
    nearest = "; or ".join(f"train.{key}={', '.join(map(str, values))}" for key, values in advice.items() if values)
    raise ConfigError(
        f"train.num_generations={generations}: a batch of {batch} completions does not hold whole groups; "
        f"nearest {nearest}"
    )


def completions(train: "DictConfig", processes: int | None) -> int:
    """Return how many completions are generated at a time, by all processes in total."""
    slices = (processes or world_size()) * (train.steps_per_generation or train.gradient_accumulation_steps)
    return train.generation_batch_size or train.per_device_train_batch_size * slices


def completions_per_process(train: "DictConfig", processes: int) -> int:
    """Return how many completions a process generates at a time."""
    return -(-completions(train, processes) // processes)


def check_whole_groups(train: "DictConfig", rewards: Iterable[str], processes: int) -> None:
    """Check that no group is divided over processes; `rewards` compare the completions of a group."""
    number = completions_per_process(train, processes)
    for name in rewards:
        if number % train.num_generations:
            raise ConfigError(
                f"reward.{name}: compares the {train.num_generations} completions of a group, and each process "
                f"generates {number}: raise train.per_device_train_batch_size={train.per_device_train_batch_size}, so "
                "that a process has whole groups"
            )


def evaluated_at_once(train: "DictConfig", processes: int) -> int:
    """Return how many problems a process evaluates at once with transformers: as many as a rollout, unless set."""
    return train.per_device_eval_batch_size or completions_per_process(train, processes)


def check_batch(train: "DictConfig", problems: int, processes: int | None = None) -> None:
    """Check that there are enough problems for a batch; with fewer problems TRL ends successfully without a step."""
    prompts = completions(train, processes) // train.num_generations
    if problems < prompts:
        raise ConfigError(
            f"task: {problems} problems to train on, and a batch takes {prompts}: lower "
            f"train.per_device_train_batch_size={train.per_device_train_batch_size} or add problems"
        )


def problems_taken(train: "DictConfig", processes: int | None = None) -> int:
    """Return how many problems `train.max_steps` take from a data set that has enough of them."""
    batch = completions(train, processes)
    slices = batch // (train.per_device_train_batch_size * (processes or world_size()))
    generations = -(-train.max_steps * train.gradient_accumulation_steps // (slices * train.num_iterations))
    return generations * batch // train.num_generations


def longest_request(task: "DictConfig", train: "DictConfig") -> int:
    """Return the tokens of the longest request to a vLLM server: of a prompt and the completion that it may get.

    In a conversation with tools, the prompt of a later turn has the completion so far.
    """
    turns = 2 if task.tools or task.environment else 1
    return task.max_prompt_length + turns * train.max_completion_length
