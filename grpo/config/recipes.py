"""Checks of rewards and recipes that refer to other parts of a configuration."""

from omegaconf import DictConfig, OmegaConf

from grpo.utils.diagnosis import why_not_best_of
from grpo.utils.errors import ConfigError

CONCISE = "rewards.concise.concise"


def check_recipes(config: DictConfig) -> None:
    """Check what a recipe needs of other groups.

    Raises:
        ConfigError: the first problem.
    """
    check_concise(config)
    if reason := why_not_best_of(config.train, config.rollout):
        raise ConfigError(reason)


def check_concise(config: DictConfig) -> None:
    """Check that a reward of this run decides which completions are correct."""
    grader = config.task.eval.reward
    for name, reward in config.reward.items():
        refers = reward.get("fn") == CONCISE and OmegaConf.is_interpolation(reward.get("kwargs"), "grader")
        if refers and (grader == name or grader not in config.reward):
            raise ConfigError(
                f"reward.{name}: task.eval.reward={grader} has to be another reward of this run, as it decides which "
                "completions are correct; for example reward=[correctness,concise]"
            )
