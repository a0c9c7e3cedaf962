"""The choice of the checkpoint to resume from; a torn checkpoint never counts as complete."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from grpo.config.batch import SLICES, completions, node_range
from grpo.config.messages import REMOVED
from grpo.config.nodes import why_fixed
from grpo.config.schema import Launch
from grpo.config.task_schema import Task
from grpo.rundir.files import RESOLVED_CONFIG, read
from grpo.utils.distributed import world_size
from grpo.utils.errors import ConfigError
from grpo.utils.manifest import difference, is_sealed
from grpo.utils.spoken import shown

KEY = "train.resume_from_checkpoint"
DECISIVE = (
    "model.model_name_or_path",
    "train.seed",
    "task.dataset",
    "task.buffer_size",
    "task.split",
    "task.prompt",
    "task.tasks",
    "task.system_prompt",
    "task.thinking",
    "task.conversational",
    "task.few_shot",
    "task.images",
    "task.image_folder",
    "task.min_pixels",
    "task.max_pixels",
    "task.tools",
    "task.environment",
    "task.environment_id",
    "task.environment_args",
    "task.answer",
    "task.max_prompt_length",
    "task.eval.split",
    "task.eval.size",
    "task.eval.reward",
    "rollout.dynamic_sampling",
    "rollout.prioritize",
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.num_generations",
    "train.num_iterations",
    "train.steps_per_generation",
    "train.optim",
    "train.fsdp",
    "train.deepspeed",
    "peft",
)
"""Keys whose values identify a run: a checkpoint with other values belongs to another run.

The keys of `task` determine the problems and their order, because held-out problems and long prompts are filtered; the
grader determines the problems that `rollout.prioritize` takes more often.
"""
OF_TRAINING_ALONE = ("lora_alpha", "lora_dropout", "quantization")
"""Keys of `peft` that change no adapter's shape."""
MAX_VALUE = 100
"""Characters of a value in a message."""


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints in a run directory that were written to their end, the newest first."""
    folders = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return [path for path in sorted(folders, key=lambda path: int(path.name[11:]), reverse=True) if is_sealed(path)]


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Return the intact checkpoint with the most steps, None without checkpoints; ConfigError if all are torn."""
    torn: list[str] = []
    for checkpoint in checkpoints(run_dir):
        problem = difference(checkpoint)
        if problem is None:
            if torn:
                print(f"skipped: {'; '.join(torn)}", file=sys.stderr)
            return checkpoint
        torn.append(f"{checkpoint.name} is torn, {problem}")
    if torn:
        raise ConfigError(
            f"{run_dir}: {'; '.join(torn)}; no checkpoint is left to continue from: move them away to begin anew"
        )
    return None


def how_to_continue(run_dir: Path) -> str:
    """Return the remedy for a run that has ended too early."""
    if checkpoints(run_dir):
        return f"the same command with {KEY}=auto continues from its last checkpoint"
    return "it has no checkpoint yet: start it again"


def is_auto(resume_from: str | bool | None) -> bool:
    """Return whether a run continues from its newest checkpoint: `auto` or, as transformers has it, true."""
    return str(resume_from).lower() in ("auto", "true")


def check_named(resume_from: str | bool | None) -> None:
    """Raise a ConfigError unless the named directory has a complete checkpoint; reads no checkpoint."""
    if resume_from and not is_auto(resume_from):
        named = Path(str(resume_from))
        if not (is_sealed(named) or checkpoints(named)):
            reason = "no complete checkpoint in it" if named.is_dir() else "there is no such directory"
            raise ConfigError(f"{KEY}={resume_from}: {reason}; name a run directory or one of its checkpoint-* folders")


def named_checkpoint(resume_from: str | bool | None, run_dir: Path) -> Path | None:
    """Return the checkpoint to continue from, after reading all of it.

    Args:
        resume_from: `auto` or true (None if there is none yet); a run directory; a checkpoint.
        run_dir: where `auto` looks.

    Raises:
        ConfigError: a directory was named and there is no complete checkpoint in it; or all of them are torn.
    """
    if not resume_from:
        return None
    if is_auto(resume_from):
        return newest_checkpoint(run_dir)
    check_named(resume_from)
    named = Path(str(resume_from))
    if is_sealed(named):
        if problem := difference(named):
            raise ConfigError(f"{KEY}={resume_from}: the checkpoint is torn, {problem}; name an older one")
        return named
    return newest_checkpoint(named)


def processes_of(checkpoint: Path) -> int | None:
    """Return how many processes have written a checkpoint, of which each has a state; None if nobody knows."""
    return len(list(checkpoint.glob("rng_state*.pth"))) or None


def differences(config: DictConfig, checkpoint: Path) -> str | None:
    """Return the difference of a run from a checkpoint's run, in `DECISIVE` and in the batch; None if equal.

    With another number of processes the batch is kept if each has as many more or fewer slices.

    Raises:
        ConfigError: this number of processes, or what differs, cannot continue it.
    """
    now = world_size()
    before = processes_of(checkpoint) or now
    where = f"{shown(checkpoint)} is of {before} process{'es' * (before > 1)} instead of {now}"
    if before != now and (reason := why_fixed(config)):
        raise ConfigError(f"{where}: {reason}")
    run = read(checkpoint.parent / RESOLVED_CONFIG, yaml.safe_load)
    if not isinstance(run, dict):
        return None
    groups = {"task": Task, "launch": Launch}
    known = {name: OmegaConf.to_container(OmegaConf.structured(group)) for name, group in groups.items()}
    saved = OmegaConf.merge(OmegaConf.create(known), OmegaConf.create(run))  # keys that are newer than the checkpoint
    assert isinstance(saved, DictConfig)
    then = saved.launch.processes * node_range(saved)[0]  # of the last start, which may have made no checkpoint
    changes = []
    for key in DECISIVE:
        old, new = (OmegaConf.select(each, key) for each in (saved, config))
        if then != now and key.removeprefix("train.") in SLICES and old and new:
            if old * then != new * now:
                keeps = f"{old * then // now} keeps" if old * then % now == 0 else "no number keeps"
                changes.append(f"{key}={old} on {then} instead of {new} on {now} ({keeps} the batch)")
                if in_generation(saved.train, then, checkpoint):
                    raise ConfigError(f"{where}, in the middle of a generation, with {changes[-1]}")
        elif difference := change(key, old, new):
            changes.append(difference)
            if key.removeprefix("train.") in SLICES and in_generation(saved.train, then, checkpoint):
                raise ConfigError(
                    f"{shown(checkpoint)} is in the middle of a generation, with {changes[-1]}: keep it, or "
                    "name a checkpoint between two generations"
                )
    check_state(saved, config, checkpoint)
    return ", ".join(changes) or None


def check_state(saved: DictConfig, config: DictConfig, checkpoint: Path) -> None:
    """Raise a ConfigError if a run differs from a checkpoint's run in what the checkpoint has, and would keep it."""
    for key, instead in REMOVED.items():
        if (value := OmegaConf.select(saved, key)) is not None:
            raise ConfigError(f"{shown(checkpoint)} is of a run with {key}={text(value)}: {instead}")
    for key, as_saved in SAVED_AS.items():
        old, new = (OmegaConf.select(each, key) for each in (saved, config))
        if as_saved(old) != as_saved(new):
            fault = "so its weights or the state of its optimizer do not fit"
            fault = "which the state of its optimizer has, too" if key in OF_OPTIMIZER else fault
            raise ConfigError(
                f"{shown(checkpoint)} is of a run with {change(key, old, new)}, {fault}: keep it, or begin a "
                "new run with its model as model.model_name_or_path"
            )


def optimizer_state(optim: str | None) -> str:
    """Return the same for values of `train.optim` whose optimizers have the same state."""
    name = str(optim or "adamw_torch").removeprefix("paged_")
    return {"adamw_torch_fused": "adamw_torch", "adamw_bnb_8bit": "adamw_8bit"}.get(name, name)


def adapter_weights(peft: DictConfig | None) -> Any:
    """Return what determines the weights of an adapter; None without one."""
    return peft and {key: value for key, value in peft.items() if key not in OF_TRAINING_ALONE}


def stage(deepspeed: DictConfig | str | None) -> Any:
    """Return the stage of ZeRO, or the file that has it; None without DeepSpeed."""
    return OmegaConf.select(deepspeed, "zero_optimization.stage") if isinstance(deepspeed, DictConfig) else deepspeed


def stateful_schedule(name: Any) -> Any:
    """Return the name of a schedule that saves its settings; None for those that are functions of the step."""
    return name if name in ("reduce_lr_on_plateau", "greedy") else None


OF_OPTIMIZER: tuple[str, ...] = ("train.learning_rate", "train.weight_decay", "train.adam_beta1", "train.adam_beta2")
OF_OPTIMIZER += ("train.adam_epsilon", "train.optim_args", "train.optim_target_modules")
"""Keys whose values transformers' trainer takes from a checkpoint, whatever is configured."""
SAVED_AS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(OF_OPTIMIZER, lambda value: value),
    "train.lr_scheduler_type": stateful_schedule,
    "train.optim": optimizer_state,
    "train.fsdp": bool,
    "train.deepspeed": stage,
    "peft": adapter_weights,
}
"""How the values of these keys change what a checkpoint has."""


def in_generation(train: DictConfig, processes: int, checkpoint: Path) -> bool:
    """Return whether later steps use completions that a checkpoint of so many processes has."""
    slices = completions(train, processes) // (train.per_device_train_batch_size * processes)
    return int(checkpoint.name[11:]) * train.gradient_accumulation_steps % (slices * train.num_iterations) != 0


def change(key: str, old: Any, new: Any) -> str | None:
    """Return the difference of two values of a key, or of the keys below it, in a line; None if they are equal."""
    if not (OmegaConf.is_dict(old) and OmegaConf.is_dict(new)):
        return f"{key}={text(old)} instead of {text(new)}" if old != new else None
    names = dict.fromkeys([*old, *new])
    changes = [change(f"{key}.{name}", as_written(old, name), as_written(new, name)) for name in names]
    return ", ".join(filter(None, changes)) or None


def as_written(group: DictConfig, name: Any) -> Any:
    """Return a value of a group; a reference to the environment, perhaps to a secret, stays one."""
    written = OmegaConf.to_container(group, resolve=False).get(name)  # type: ignore[union-attr]
    return written if isinstance(written, str) and "${oc.env:" in written else group.get(name)


def text(value: object) -> str:
    """Return a value of the configuration in a short line."""
    line = json.dumps(OmegaConf.to_container(value)) if OmegaConf.is_config(value) else str(value)
    return line if len(line) <= MAX_VALUE else f"{line[: MAX_VALUE - 1]}…"
