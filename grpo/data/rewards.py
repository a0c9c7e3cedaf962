"""The reward functions of a run, each in a process of its own."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config.mixture import graded_by, scored_by
from grpo.config.schema import REWARD_MODEL, ROOT
from grpo.utils.distributed import gathered, log_name
from grpo.utils.errors import ConfigError
from grpo.utils.spoken import shown
from rewards.isolation.loader import FROM_TRL
from rewards.isolation.reward import Reward


def reward_options(rewards: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the options of the configured reward functions by their names, without reward models."""
    every: dict[str, dict[str, Any]] = OmegaConf.to_container(rewards, resolve=True)  # type: ignore[assignment]
    return {name: options for name, options in every.items() if options["fn"] != REWARD_MODEL}


def load_reward_model(name: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a reward model, named as in the configuration, and its tokenizer; ConfigError if it cannot be loaded."""
    from rewards.scorer import load

    try:
        model, tokenizer = load(**options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"reward.{name}.kwargs: {error}") from error
    model.config._name_or_path = name  # which TRL calls its metrics by
    return model, tokenizer


def grader_of(name: str, rewards: DictConfig, train: DictConfig) -> dict[str, dict[str, Any]]:
    """Return name and options of the grader `task.eval.reward`: one of the run's rewards, or one of `conf/reward`.

    A file of `conf/reward` may refer to values of `train`.

    Raises:
        ConfigError: the reward does not exist.
    """
    if name in rewards and rewards[name].fn == REWARD_MODEL:
        raise ConfigError(f"task.eval.reward={name}: the score of a reward model is no accuracy; name another")
    if name in rewards:
        return {name: reward_options(rewards)[name]}
    file = ROOT / "conf" / "reward" / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"task.eval.reward={name}: neither a reward of this run nor one of conf/reward")
    known = OmegaConf.create({"train": train, "reward": OmegaConf.load(file)})
    return OmegaConf.to_container(known.reward, resolve=True)  # type: ignore[return-value]


def check_grader(grader: Reward) -> None:
    """Raise a ConfigError if a reward needs arguments that only a trainer has: it cannot grade an evaluation."""
    for argument in FROM_TRL:
        if argument in grader.needs and argument not in ("prompts", "completions"):
            raise ConfigError(
                f"task.eval.reward={grader.name}: it needs {argument}, which an evaluation does not have; name another"
            )


def errors_of(rewards: dict[str, Reward]) -> dict[str, dict[str, int]]:
    """Return how many completions the rewards of this process failed on, by reward and kind of error."""
    return {name: dict(reward.errors) for name, reward in rewards.items() if reward.errors}


def errors_of_all(rewards: dict[str, Reward]) -> dict[str, dict[str, int]]:
    """Return the same counts over all processes; a collective call."""
    everywhere = gathered([errors_of(rewards)])
    names = dict.fromkeys(name for errors in everywhere for name in errors)
    return {name: dict(sum((Counter(errors.get(name, {})) for errors in everywhere), Counter())) for name in names}


def counts(rewards: Mapping[str, Reward]) -> dict[str, tuple[int, int]]:
    """Return how many completions the rewards of this process have scored and failed on."""
    return {name: (reward.scored, reward.errors.total()) for name, reward in rewards.items()}


def useless(rewards: Mapping[str, Reward], before: Mapping[str, tuple[int, int]]) -> str | None:
    """Return the reward that has failed on every completion of all processes since `before`; a collective call."""
    now = counts(rewards)
    here = {name: (now[name][0] - before[name][0], now[name][1] - before[name][1]) for name in rewards}
    everywhere = gathered([{name: (*here[name], reward.fault) for name, reward in rewards.items()}])
    for name, reward in rewards.items():
        scored, errors = (sum(process[name][part] for process in everywhere) for part in (0, 1))
        if errors and not scored:
            fault = next(process[name][2] for process in everywhere if process[name][2])
            where = f"; the completion is in {shown(reward.errors_file)}" if reward.errors_file else ""
            return f"reward.{name}: failed on every completion: {fault}{where}"
    return None


def usable_columns(
    task: DictConfig, names: Iterable[str], columns: Sequence[str], by_task: Mapping[str, Sequence[str]]
) -> dict[str, list[str]]:
    """Return the columns that each reward can use: of a mixture, those of all tasks that it scores or grades.

    Args:
        task: the group of the configuration.
        names: of rewards.
        columns: of the data.
        by_task: likewise, by task; empty without a mixture.
    """
    usable = {}
    for name in names:
        tasks = {*scored_by(task, name), *graded_by(task, name)} if task.tasks else set()
        usable[name] = [column for column in columns if all(column in by_task[single] for single in tasks)]
    return usable


@contextmanager
def running_rewards(
    options: dict[str, dict[str, Any]], columns: Mapping[str, Sequence[str]], run_dir: Path, errors_file: Path
) -> Iterator[dict[str, Reward]]:
    """Context with running rewards.

    The log of this process in `run_dir` gets their output, `errors_file` the first row of each kind of error.

    Args:
        options: of each reward.
        columns: that each reward can use.

    Raises:
        ConfigError: a reward cannot be loaded, or needs a column that the data lacks.
    """
    rewards: dict[str, Reward] = {}
    with ExitStack() as stack:
        output = stack.enter_context((run_dir / log_name()).open("a"))
        for name, settings in options.items():
            arguments = {key: value for key, value in settings.items() if key != "weight"}
            try:
                reward = Reward(name=name, errors_file=errors_file, output=output, **arguments)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            stack.callback(reward.close)
            if name in columns[name]:
                raise ConfigError(f"reward.{name}: the data has a column of this name; give the reward another name")
            if missing := reward.missing(columns[name]):
                known = ", ".join(columns[name])
                raise ConfigError(f"reward.{name}: needs a column {missing[0]}; the data has: {known}")
            rewards[name] = reward
        yield rewards
