"""The reward functions of a run, each in a process of its own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config import ROOT, ConfigError
from rewards.isolation import Reward

ERRORS_FILE = "reward_errors.jsonl"


@contextmanager
def rewards_of(config: DictConfig, columns: Sequence[str], run_dir: Path) -> Iterator[dict[str, Reward]]:
    """Start the configured rewards, in their order, and then, if it is none of them, the one that judges evaluations.

    Args:
        columns: of the data.
        run_dir: gets the first row of each kind of error, and what the functions print.

    Raises:
        ConfigError: one cannot be loaded, or needs a column that the data does not have.
    """
    wanted: dict[str, Any] = OmegaConf.to_container(config.reward, resolve=True)  # type: ignore[assignment]
    judge = config.task.eval.reward
    if config.task.eval.size and judge not in wanted:
        wanted[judge] = shipped(judge, config)
    started: dict[str, Reward] = {}
    with ExitStack() as stack:
        output = stack.enter_context((run_dir / "train.log").open("a"))
        for name, options in wanted.items():
            options.pop("weight", None)
            try:
                reward = Reward(name=name, errors_file=run_dir / ERRORS_FILE, output=output, **options)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            stack.callback(reward.close)
            for column in reward.needs:
                if column not in columns:
                    raise ConfigError(f"reward.{name}: needs a column {column}; the data has: {', '.join(columns)}")
            started[name] = reward
        yield started


def shipped(name: str, config: DictConfig) -> dict[str, Any]:
    """Return the options of a reward of `conf/reward`."""
    file = ROOT / "conf" / "reward" / f"{name}.yaml"
    if not file.is_file():
        raise ConfigError(f"task.eval.reward={name}: neither a reward of this run nor one of conf/reward")
    known = OmegaConf.create({"train": config.train, "reward": OmegaConf.load(file)})
    options: dict[str, Any] = OmegaConf.to_container(known.reward[name], resolve=True)  # type: ignore[assignment]
    return options
