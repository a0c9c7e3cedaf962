"""Checks of the rewards of a configuration, with one-line errors. No heavy imports."""

from dataclasses import fields
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from grpo.config.messages import meant
from grpo.config.schema import REWARD_MODEL, Reward
from grpo.config.tools import is_taskset
from grpo.utils.errors import ConfigError
from grpo.utils.table import OF_COMPLETIONS

CONCISE = "rewards.concise.concise"


def check_names_of_rewards(config: DictConfig) -> None:
    """Check that each reward stands below its name, and that one of them has a weight."""
    for key, reward in config.reward.items():
        if not isinstance(reward, DictConfig):
            raise ConfigError(
                f"reward.{key}={reward}: the keys of a reward stand below its name, {{mine: {{fn: …, weight: 1}}}}, "
                "as in conf/reward/format.yaml"
            )
    if config.reward and not any(reward.get("weight", 1.0) for reward in config.reward.values()):
        raise ConfigError("reward: all weights are 0, so that no completion is better than another")


def check_rewards(config: DictConfig) -> None:
    """Check that there is a reward function, and the keys of every reward."""
    if config.train.remove_unused_columns:
        raise ConfigError(
            "train.remove_unused_columns=true: rewards and tools need the columns of the data; leave it out"
        )
    if not config.reward and not config.task.environment and not is_taskset(config.task):
        raise ConfigError("reward: a run needs at least one reward function, for example reward=[correctness]")
    if config.train.reward_weights is not None:
        raise ConfigError("train.reward_weights: a weight stands beside its function, reward.<name>.weight=0.5")
    for key in sorted(OmegaConf.missing_keys(config.reward)):
        raise ConfigError(f"{key}: needs a value")
    for name, reward in config.reward.items():
        check_reward(f"reward.{name}", reward)
        if name in OF_COMPLETIONS:
            raise ConfigError(f"reward.{name}: a table of completions has this column; give the reward another name")
        if reward.fn != REWARD_MODEL:
            continue
        model = str(reward.kwargs.model_name_or_path)
        if model.startswith(("/", ".")) and not (Path(model) / "config.json").is_file():
            raise ConfigError(f"reward.{name}.kwargs.model_name_or_path={model}: there is no model in this folder")
        if reward.get("weight", 1.0) and config.rollout.dynamic_sampling:
            reason = f"those of reward.{name}, a reward model, are never equal"
            raise ConfigError(f"rollout.dynamic_sampling=true: it replaces groups of equal rewards, and {reason}")


def check_reward(where: str, reward: DictConfig) -> None:
    """Check the keys and values of a reward."""
    try:
        options = OmegaConf.merge(OmegaConf.structured(Reward), reward)
    except (ConfigKeyError, ValidationError) as error:
        key, problem = str(error.full_key), str(error).splitlines()[0]
        known = [field.name for field in fields(Reward)]
        unknown = isinstance(error, ConfigKeyError)
        raise ConfigError(f"{where}.{key}: {'no such key' + meant(key, known) if unknown else problem}") from error
    if OmegaConf.is_missing(options, "fn"):
        raise ConfigError(
            f"{where}.fn: needs a value, package.module.function, path/to/file.py:function or an entry point"
        )
    if options.timeout <= 0:
        raise ConfigError(f"{where}.timeout={options.timeout:g}: a positive number of seconds is needed")
    if options.workers < 1:
        raise ConfigError(f"{where}.workers={options.workers}: a positive whole number is needed")
    if options.on_error not in ("skip", "raise"):
        raise ConfigError(f"{where}.on_error={options.on_error}: unknown{meant(options.on_error, ('skip', 'raise'))}")


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


def check_files_of_rewards(rewards: DictConfig) -> None:
    """Check that the files of reward functions are there; a plan, and an evaluation elsewhere, do not need them."""
    for name, reward in rewards.items():
        file = Path(str(reward.fn).rpartition(":")[0])
        if file.suffix == ".py" and not file.is_file():
            raise ConfigError(f"reward.{name!s}.fn: there is no file {file.absolute()}")
