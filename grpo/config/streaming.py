"""Checks of a stream of problems, whose number is not known."""

from typing import TYPE_CHECKING

from grpo.utils.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def check_streaming(config: "DictConfig") -> None:
    """Check the options of a stream.

    Raises:
        ConfigError: the first problem.
    """
    task, streaming = config.task, config.task.dataset.get("streaming")
    if streaming not in (True, False, None):
        raise ConfigError(f"task.dataset.streaming={streaming}: true or false")
    if task.buffer_size < 1:
        raise ConfigError(f"task.buffer_size={task.buffer_size}: rows of a stream that are read at once, at least 1")
    if not streaming:
        return
    if config.train.max_steps < 1:
        raise ConfigError("task.dataset.streaming=true: a stream has no length; set train.max_steps")
    for key, split in (("task.split", task.split), ("task.eval.split", task.eval.split)):
        if "[" in split:
            raise ConfigError(
                f"{key}={split}: a stream has no slices; with task.split and task.eval.split of the same name, the "
                "first task.eval.size rows are held out"
            )
