"""One line for what is wrong with a configuration: where, what was meant, what is possible. No heavy import here."""

import difflib
import math
import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from grpo.check_vllm import check_vllm_options
from grpo.config import (
    GRPO_CONFIG,
    LORA_CONFIG,
    LOSS_MEANS,
    NOT_SETTABLE,
    ROOT,
    Reward,
    library_fields,
    optimizer_names,
)
from grpo.errors import ConfigError

LEVELS = ("token", "sequence")
REWARD_KEYS = [field.name for field in fields(Reward)]


def meant(word: object, possible: Iterable[object]) -> str:
    """Return `; did you mean a, b?` with the names closest to `word`, or a list of what is possible."""
    names = sorted({str(name) for name in possible})
    close = difflib.get_close_matches(str(word), names, n=3, cutoff=0.6)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; possible: {', '.join(names)}" if 0 < len(names) <= 30 else ""


def explain(error: Exception) -> str:
    """Turn what Hydra or OmegaConf raised into one line."""
    if isinstance(error, MissingConfigException):
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        return f"{group}={choice}: no such choice{meant(choice, error.options or [])}"
    if "Ambiguous value for argument" in str(error):
        override = str(error).split("'")[1]
        key, _, values = override.partition("=")
        return f"{override}: several values are a sweep, python -m grpo.train -m …; one list is {key}=[{values}]"
    if isinstance(error, OverrideParseException):
        how = "write key=value, in quotes if it has spaces or braces"
        return f"{error.override}: not an override ({_first_line(error)}); {how}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, MissingMandatoryValue):
        return f"{cause.full_key or ''}: needs a value".lstrip(": ")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        group, _, key = str(cause.full_key).rpartition(".")
        if group == "train" and key in NOT_SETTABLE:
            return f"{cause.full_key}: {NOT_SETTABLE[key]}"
        if type(cause).__name__.startswith("Config"):
            plus = f"; a new reward is added with a plus: +{cause.full_key}.fn=…" if group == "reward" else ""
            return f"{cause.full_key}: no such key{meant(cause.key, _possible_keys(cause))}{plus}"
        return (
            f"{cause.full_key}: {_first_line(cause).removeprefix('ConfigError raised while resolving interpolation: ')}"
        )
    if "use +" in str(error):  # a group that is not in the defaults list
        return f"{str(error).rpartition('use ')[2].strip()}: this is how it is written, with a plus"
    return " ".join(str(error).split("\n")[:2])


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def _possible_keys(error: OmegaConfBaseException) -> list[str]:
    parent = error.parent_node
    keys = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
    if str(error.full_key) == str(error.key):  # at the top, a choice from a group may have been meant
        keys += [path.name for path in (ROOT / "conf").iterdir() if path.is_dir()]
    return keys


def check(config: DictConfig) -> None:
    """Check what can be checked without loading a library.

    Raises:
        ConfigError: with the first thing that is wrong.
    """
    known = library_fields(GRPO_CONFIG)
    for key in config.train:  # `+train.key` gets past the schema
        if key not in known or key in NOT_SETTABLE:
            raise ConfigError(f"train.{key}: {NOT_SETTABLE.get(key) or 'no such key' + meant(key, known)}")
    check_folder(config.model.model_name_or_path, config.model.gguf_file)
    check_rewards(config)
    check_peft(config)
    check_vllm_options(config)
    for key, possible in (("loss_type", LOSS_MEANS), ("importance_sampling_level", LEVELS)):
        value = config.train[key]
        if value not in possible:
            raise ConfigError(f"train.{key}={value}: unknown{meant(value, possible)}")
    check_groups(config.train, processes(config))
    check_precision(config)
    optimizers = optimizer_names()
    if config.train.optim is not None and config.train.optim not in optimizers:
        raise ConfigError(f"train.optim={config.train.optim}: unknown{meant(config.train.optim, optimizers)}")
    check_update(config["update"])
    if config.task.dataset.get("generator") and isinstance(config.task.dataset.get("size"), int):
        check_batch(config.train, config.task.dataset.size, processes(config))


def check_update(update: DictConfig) -> None:
    """Check the values of the `update` group."""
    tokens = update.max_tokens_per_microbatch
    if tokens != "auto" and (type(tokens) is not int or tokens < 1):
        raise ConfigError(f"update.max_tokens_per_microbatch={tokens}: auto, or a positive number of tokens")
    if update.on_oom not in ("retry", "raise"):
        raise ConfigError(f"update.on_oom={update.on_oom}: unknown{meant(update.on_oom, ('retry', 'raise'))}")
    if update.max_skipped_steps < 1:
        raise ConfigError(f"update.max_skipped_steps={update.max_skipped_steps}: a positive number of steps")


def check_rewards(config: DictConfig) -> None:
    """Check that there is a reward function, and the keys of each."""
    if not config.reward:
        raise ConfigError("reward: a run needs at least one reward function, for example reward=[correctness]")
    if config.train.reward_weights is not None:
        raise ConfigError("train.reward_weights: a weight stands beside its function, reward.<name>.weight=0.5")
    for key in sorted(OmegaConf.missing_keys(config.reward)):
        raise ConfigError(f"reward.{key}: needs a value")
    for name, reward in config.reward.items():
        check_reward(f"reward.{name}", reward)


def check_reward(where: str, reward: DictConfig) -> None:
    """Check the keys and values of one reward."""
    for key in reward:
        if key not in REWARD_KEYS:
            raise ConfigError(f"{where}.{key!s}: no such key{meant(key, REWARD_KEYS)}")
    if "fn" not in reward:
        raise ConfigError(
            f"{where}.fn: needs a value, package.module.function, path/to/file.py:function or an entry point"
        )
    if not isinstance(reward.get("weight", 1.0), int | float):
        raise ConfigError(f"{where}.weight={reward.weight}: a number is needed")
    timeout, workers, on_error = reward.get("timeout", 1), reward.get("workers", 1), reward.get("on_error", "skip")
    if not isinstance(timeout, int | float) or timeout <= 0:
        raise ConfigError(f"{where}.timeout={timeout}: a positive number of seconds is needed")
    if not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"{where}.workers={workers}: a positive whole number is needed")
    if on_error not in ("skip", "raise"):
        raise ConfigError(f"{where}.on_error={on_error}: unknown{meant(on_error, ('skip', 'raise'))}")


def check_peft(config: DictConfig) -> None:
    """Check the names of the adapter's options."""
    if config.peft is None:
        return
    known = [*library_fields(LORA_CONFIG), "quantization"]
    for key in config.peft:
        if key not in known:
            raise ConfigError(f"peft.{key}: not an option of peft.LoraConfig{meant(key, known)}")


def processes(config: DictConfig) -> int:
    """Return how many processes train: as planned for, or as `torchrun` started them."""
    return started() if config.plan.processes is None else config.plan.processes


def started() -> int:
    """Return how many processes `torchrun` has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_precision(config: DictConfig) -> None:
    """Check what float16's loss scale cannot go with, and what gradients in host memory cannot."""
    train, update = config.train, config["update"]
    if train.fp16 and train.bf16:
        raise ConfigError("train.fp16=true train.bf16=true: one of them, bf16 where the card has it")
    if train.fp16 and config.peft is None and config.model.dtype == "float16":
        raise ConfigError(
            "peft=none: weights in float16 cannot be trained with train.fp16; use peft=lora or model.dtype=float32"
        )
    if update.gradients_on_host and (train.fp16 or processes(config) > 1 or "schedule_free" in str(train.optim)):
        raise ConfigError(
            "update.gradients_on_host works with one process, in bfloat16 or float32, and not with schedule_free "
            "optimizers; leave it out, or use train.fsdp with several processes"
        )


def check_groups(train: DictConfig, processes: int | None = None) -> None:
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


def completions(train: DictConfig, processes: int | None) -> int:
    """Return how many completions are generated at a time, by all processes together."""
    slices = (processes or started()) * (train.steps_per_generation or train.gradient_accumulation_steps)
    return train.generation_batch_size or train.per_device_train_batch_size * slices


def check_batch(train: DictConfig, problems: int, processes: int | None = None) -> None:
    """Check that there are enough problems for a batch; with fewer TRL does no step, and calls that a success."""
    prompts = completions(train, processes) // train.num_generations
    if problems < prompts:
        raise ConfigError(
            f"task: {problems} problems to train on, and a batch takes {prompts}: lower "
            f"train.per_device_train_batch_size={train.per_device_train_batch_size} or add problems"
        )


def check_folder(name: str, gguf_file: str | None = None) -> None:
    """Check that a folder named as a model holds one."""
    folder = Path(name)
    if gguf_file:
        if not (folder / gguf_file).is_file():
            raise ConfigError(f"model.gguf_file={gguf_file}: there is no such file in the folder {folder}")
        return
    if folder.is_dir() and not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        what = "an adapter, not a model: name its base" if adapter else "no model (no config.json)"
        raise ConfigError(f"model.model_name_or_path={name}: the folder holds {what}")
