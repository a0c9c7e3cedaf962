"""Refusals of a guarded run, before anything is loaded."""

from typing import Any

from omegaconf import DictConfig

from grpo.config.mixture import single_tasks
from grpo.planning.sharding import sharding_of
from grpo.utils.errors import ConfigError

LOSSY = ("reduce_lr_on_plateau", "greedy")
"""Schedules that choose the learning rate themselves."""


def check_guard(config: DictConfig) -> None:
    """Raise a ConfigError for the first option that is wrong, or does not work with a guard; nothing without one."""
    if not config.guard:
        return
    for name, (accepts, possible) in POSSIBLE.items():
        if not accepts(value := config.guard[name]):
            raise ConfigError(f"guard.{name}={value}: {possible}")
    train = config.train
    reasons = {
        "task.eval.size=0: there are no held-out problems to look at; task.eval.size=200 holds some out": not any(
            task.eval.size for task in single_tasks(config.task).values()
        ),
        "shard: a rollback loads no sharded weights within a training; shard=none": sharding_of(config).library,
        f"engine.staleness={config.engine.staleness}: rollouts in flight are of the policy before a rollback; "
        "engine.staleness=0": config.engine.staleness,
        "train.save_only_model=true: a rollback needs the optimizer's state; train.save_only_model=false": (
            train.save_only_model
        ),
        f"train.lr_scheduler_type={train.lr_scheduler_type}: it chooses the learning rate itself, which a rollback "
        "halves; train.lr_scheduler_type=constant": train.lr_scheduler_type in LOSSY,
        "the guard chooses the best checkpoint; leave out train.load_best_model_at_end and "
        "train.metric_for_best_model, or use guard=none": train.load_best_model_at_end or train.metric_for_best_model,
        "replay.keep: its checkpoints and the guard's come at different steps; train.save_total_limit=null keeps all": (
            config.replay.keep and train.save_total_limit
        ),
    }
    for reason, refused in reasons.items():
        if refused:
            raise ConfigError(f"guard=accuracy: {reason}")


def is_count(value: Any, least: int = 1) -> bool:
    """Return whether a value is a whole number, and not too small."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


POSSIBLE = {
    "every": (is_count, "a number of steps, at least 1"),
    "samples": (is_count, "a number of held-out problems, at least 1"),
    "rollbacks": (lambda value: is_count(value, 0), "a number of rollbacks, or 0: the first fall ends the run"),
    "error": (lambda value: isinstance(value, float) and 0 < value < 1, "a probability between 0 and 1, such as 0.05"),
    "plateau": (lambda value: value is None or is_count(value), "a number of looks, or null: no plateau ends the run"),
    "rise": (lambda value: isinstance(value, float) and 0 < value < 1, "a fraction of accuracy, such as 0.05"),
}
"""Options: whether a value is possible, and the possible values."""
