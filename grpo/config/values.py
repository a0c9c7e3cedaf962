"""The ranges of values in a configuration: sampling, steps, thinking, and what time and cost follow from."""

import math

from omegaconf import DictConfig, OmegaConf

from grpo.config.mixture import single_tasks, where
from grpo.utils.errors import ConfigError

POSITIVE = ("train.temperature", "train.repetition_penalty")
"""Numbers that are positive; `POSITIVE_OR_NULL` may be null."""
POSITIVE_OR_NULL = ("plan.hourly_price", "gpu.tflops", "gpu.bandwidth_gb_s")
NOT_NEGATIVE = {
    "learning_rate": "0 or more",
    "beta": "0 or more",
    "top_k": "a positive number of tokens, or 0 for no limit",
}
"""Keys of `train`, and their possible values."""


def check_ranges(train: DictConfig) -> None:
    """Check the learning rate and the sampling filters."""
    for key, possible in NOT_NEGATIVE.items():
        if (value := train[key]) is None or value < 0:
            raise ConfigError(f"train.{key}={value if value is None else f'{value:g}'}: {possible}")
    if train.top_p is None or not 0 < train.top_p <= 1:
        raise ConfigError(f"train.top_p={train.top_p}: above 0, and 1 for no limit")
    if train.min_p is not None and not 0 <= train.min_p <= 1:
        raise ConfigError(f"train.min_p={train.min_p}: from 0 to 1, or null")


def check_values(config: DictConfig) -> None:
    """Check that numbers are in their ranges, and that the run has a step.

    Raises:
        ConfigError: the first problem.
    """
    train = config.train
    for key in (*POSITIVE, *POSITIVE_OR_NULL):
        value = OmegaConf.select(config, key)
        if value is None and key in POSITIVE_OR_NULL:
            continue
        if value is None or not 0 < value < math.inf:
            null = ", or null" if key in POSITIVE_OR_NULL else ""
            raise ConfigError(f"{key}={value if value is None else f'{value:g}'}: a positive number is needed{null}")
    check_ranges(train)
    for key in ("train.max_completion_length", "task.max_prompt_length"):
        if (length := OmegaConf.select(config, key)) is not None and length < 1:
            raise ConfigError(f"{key}={length}: at least 1 token")
    for name, task in single_tasks(config.task).items():
        if task.eval.size < 0:
            raise ConfigError(f"{where(name)}.eval.size={task.eval.size}: a number of held-out problems, or 0")
    if not 0 <= train.seed < 2**32:
        raise ConfigError(f"train.seed={train.seed}: from 0 to 2**32 - 1")
    check_thinking(config.task)
    by_epochs = train.max_steps == -1 and 0 < train.num_train_epochs < math.inf
    if train.max_steps <= 0 and not by_epochs:
        raise ConfigError(
            f"train.max_steps={train.max_steps} train.num_train_epochs={train.num_train_epochs}: the run would have no "
            "step; give a positive number of steps, or train.max_steps=-1 and a positive number of epochs"
        )


def check_thinking(task: DictConfig) -> None:
    """Check that `task.thinking` has a value that chat templates take, and that there is one, unless it is false."""
    thinking = task.get("thinking")
    if thinking not in (None, True, False, "low", "medium", "high"):
        raise ConfigError(f"task.thinking={thinking}: give true, false, low, medium, high or null")
    if thinking not in (None, False) and not all(single.conversational for single in single_tasks(task).values()):
        raise ConfigError(
            f"task.thinking={str(thinking).lower()}: an argument of the chat template, which plain prompts do not "
            "have; add task.conversational=true"
        )
