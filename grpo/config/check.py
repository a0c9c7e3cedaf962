"""Checks of a configuration, with one-line errors: key, likely intention, possible values. No heavy imports."""

import re
from importlib.util import find_spec
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from grpo import losses
from grpo.config.batch import check_batch, check_groups, processes
from grpo.config.check_mixture import check_mixture
from grpo.config.check_rewards import check_concise, check_names_of_rewards, check_rewards
from grpo.config.devices import check_device, check_facts, vendor_of
from grpo.config.facts import Facts, generator_of, is_quantized, sharding_strategy
from grpo.config.library import GRPO_CONFIG, LORA_CONFIG, library_fields, optimizer_names
from grpo.config.messages import GGUF, REMOVED, elsewhere, meant
from grpo.config.mixture import generated
from grpo.config.nodes import check_range
from grpo.config.rules import refusal
from grpo.config.schema import GROUPS, NOT_SETTABLE, PARTS, REWARD_MODEL
from grpo.config.streaming import check_streaming
from grpo.config.tools import check_tools
from grpo.config.transport import why_merged
from grpo.config.values import check_values
from grpo.options import LOSS_MEANS, VLLM, Engine, Rollout, Update
from grpo.utils.distributed import is_launched
from grpo.utils.errors import ConfigError
from grpo.utils.local_gpu import local_gpu

LEVELS = ("token", "sequence")
TRACKING = ("trackio", "wandb")
"""Services in the extra `tracking`."""


def check(config: DictConfig) -> None:
    """Check everything that needs no loaded library.

    Raises:
        ConfigError: the first problem.
    """
    check_top_level(config)
    check_names_of_rewards(config)
    check_facts(config)
    check_mixture(config)
    known = library_fields(GRPO_CONFIG)
    for key in config.train:  # `+train.key` gets past the schema
        if key not in known or key in NOT_SETTABLE:
            places = " or ".join(elsewhere(str(key)))
            guess = f"; did you mean {places}?" if places else meant(key, known)
            raise ConfigError(f"train.{key}: {NOT_SETTABLE.get(key) or 'no such key' + guess}")
    check_folder(config.model.model_name_or_path)
    check_concise(config)
    check_rewards(config)
    check_tools(config)
    check_peft(config)
    check_images(config)
    check_streaming(config)
    check_completions(config)
    check_callbacks(config)
    check_vllm_options(config)
    for key, possible in (("loss_type", (*LOSS_MEANS, *losses.NAMES)), ("importance_sampling_level", LEVELS)):
        value = config.train[key]
        if value not in possible:
            raise ConfigError(f"train.{key}={value}: unknown{meant(value, possible)}")
    check_values(config)
    check_device(config)
    check_groups(config.train, processes(config))
    check_range(config)
    optimizers = optimizer_names()
    if config.train.optim is not None and config.train.optim not in optimizers:
        raise ConfigError(f"train.optim={config.train.optim}: unknown{meant(config.train.optim, optimizers)}")
    try:
        Update(**config["update"])
        Engine(**config.engine)
        Rollout(**config.rollout)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if reason := refusal(facts_of(config)):
        raise ConfigError(reason)
    if (size := generated(config.task)) is not None:
        check_batch(config.train, size, processes(config))


def facts_of(config: DictConfig) -> Facts:
    """Return the facts of a composed configuration."""
    train, task = config.train, config.task
    has_gpu = config.gpu is not None or local_gpu() is not None
    return Facts(
        train=train,
        update=config["update"],
        engine=config.engine,
        rollout=config.rollout,
        processes=processes(config),
        device=vendor_of(config) if has_gpu else "cpu",
        generator=generator_of(train),
        sharding=sharding_strategy(train),
        adapter=config.peft is not None,
        quantized=is_quantized(config.peft),
        images=bool(task.images),
        mixture=bool(task.tasks),
        stream=bool(task.dataset.get("streaming")),
        in_process=any(reward.get("fn") == REWARD_MODEL for reward in config.reward.values()),
        dtype=str(config.model.dtype),
        merged=why_merged(config) if config.peft is not None else None,
    )


def check_top_level(config: DictConfig) -> None:
    """Check that each group is in the schema, or is a value that others refer to; `+name=value` bypasses the schema."""
    for key, instead in REMOVED.items():
        group, _, name = key.partition(".")
        if name in config[group]:
            raise ConfigError(f"{key}: {instead}")
    for name in (str(key) for key in config if key not in GROUPS):
        if not re.search(rf"\$\{{[^}}]*\b{re.escape(name)}\b", str(OmegaConf.to_container(config))):
            places = " or ".join(elsewhere(name))
            known = f"; did you mean {places}?" if places else meant(name, GROUPS)
            raise ConfigError(f"{name}: no such group{known}; and no value refers to it as ${{{name}}}")


def check_images(config: DictConfig) -> None:
    """Check how images are shown, and which parts of the model are to stay as they are."""
    task = config.task
    if task.images and not task.conversational:
        raise ConfigError(f"task.images={task.images}: needs task.conversational=true, as images stand in messages")
    smallest, largest = (value if value is not None else 1 for value in (task.min_pixels, task.max_pixels))
    if smallest < 1 or largest < 1 or (task.max_pixels and smallest > largest):
        raise ConfigError(
            f"task.min_pixels={task.min_pixels} task.max_pixels={task.max_pixels}: positive, the first the smaller one"
        )
    for part in config.model.freeze:
        if part not in PARTS:
            raise ConfigError(f"model.freeze: {part}: unknown; possible: {', '.join(PARTS)}")
    if config.model.freeze and config.peft and config.peft.get("vision"):
        raise ConfigError(f"model.freeze={config.model.freeze}: peft.vision=true trains adapters there; leave one out")


MODULES_ONLY = ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out", "velora_config", "kasa_config")
"""Options of LoRA that PEFT has for modules alone (`ParamWrapper` in peft/tuners/lora/layer.py)."""


def check_peft(config: DictConfig) -> None:
    """Check the names of the adapter's options."""
    if config.peft is None:
        return
    known = [*library_fields(LORA_CONFIG), "quantization", "vision"]
    for key in config.peft:
        if key not in known:
            raise ConfigError(f"peft.{key}: not an option of peft.LoraConfig{meant(key, known)}")
    if "task_type" not in config.peft:  # which the choices of conf/peft have
        raise ConfigError(f"peft.{next(iter(config.peft))}: of which adapters? Add peft=lora or peft=qlora")
    if parameters := config.peft.get("target_parameters"):
        if isinstance(parameters, str):
            raise ConfigError(f"peft.target_parameters={parameters}: a list is needed: [{parameters}]")
        for key in MODULES_ONLY:
            if config.peft.get(key):
                raise ConfigError(f"peft.target_parameters: PEFT has no peft.{key} of parameters; leave one out")


def check_shard(config: DictConfig) -> None:
    """Check that there are processes to shard over, and that the run can resume.

    Raises:
        ConfigError: the first problem.
    """
    train = config.train
    if sharding_strategy(train) == "FSDP2" and train.optim == "sgd":
        raise ConfigError(
            "train.optim=sgd: PyTorch cannot resume a run that FSDP2 shards with an optimizer that keeps no state; use "
            "adamw_torch, or shard=zero2 or zero3"
        )
    if not (train.fsdp or train.deepspeed):
        return
    name = HydraConfig.get().runtime.choices.get("shard") if HydraConfig.initialized() else None
    where = f"shard={name}" if name not in (None, "none") else "train.fsdp" if train.fsdp else "train.deepspeed"
    if processes(config) == 1 and not is_launched():
        raise ConfigError(f"{where}: one process has nothing to shard; launch.processes=auto takes every GPU")


def check_deepspeed(train: DictConfig) -> None:
    """Check that DeepSpeed is installed if it shards the run; a plan does not need it."""
    if train.deepspeed and find_spec("deepspeed") is None:
        raise ConfigError("train.deepspeed: DeepSpeed is not installed; `make deepspeed` installs it")


def check_folder(name: str) -> None:
    """Check that a folder in `model.model_name_or_path` holds a model."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        what = "an adapter, not a model: name its base" if adapter else "no model (no config.json)"
        what += f"; {GGUF}" if any(folder.glob("*.gguf")) else ""
        raise ConfigError(f"model.model_name_or_path={name}: the folder holds {what}")


def check_completions(config: DictConfig) -> None:
    """Check that values per token are of completions that are kept."""
    if config.completions.tokens and not config.train.log_completions:
        raise ConfigError(
            "completions.tokens=true: these are values of completions in completions/, which "
            "train.log_completions=false does not write"
        )


def check_callbacks(config: DictConfig) -> None:
    """Check the form of `callbacks`, and that the checkpoints of a run let its steps be computed again.

    Raises:
        ConfigError: the first problem.
    """
    for name, options in config.callbacks.items():
        if not (OmegaConf.is_dict(options) and "fn" in options and set(options) <= {"fn", "kwargs"}):
            raise ConfigError(f"callbacks.{name}: needs fn, a callback's class or a function, and takes kwargs")
    steps, train = config.replay.keep, config.train
    if steps < 0:
        raise ConfigError(f"replay.keep={steps}: a number of steps, or 0")
    if steps and (config.task.images or "replay" not in config.callbacks):
        reason = "rollouts with images are not kept" if config.task.images else "callbacks.replay is missing"
        raise ConfigError(f"replay.keep={steps}: {reason}; leave it out")
    resumable = train.save_strategy == "steps" and train.save_steps >= 1 and not train.save_only_model
    if steps and resumable and train.save_total_limit:
        reach = int((train.save_total_limit - 1) * train.save_steps)
        if reach < steps:
            limit = -int(-steps // train.save_steps) + 1
            raise ConfigError(
                f"replay.keep={steps}: a step is computed again from the checkpoint before it, and those that "
                f"train.save_total_limit={train.save_total_limit} keeps reach {reach} steps back; "
                f"train.save_total_limit={limit}, or fewer steps"
            )


def check_report_to(train: DictConfig) -> None:
    """Check that the services for experiments are installed; a plan does not need them."""
    services = [train.report_to] if isinstance(train.report_to, str) else train.report_to or []
    for name in services:
        if name in TRACKING and find_spec(name) is None:
            raise ConfigError(f"train.report_to={name}: {name} is not installed: pip install 'grpo-trainer[tracking]'")


def check_vllm_options(config: DictConfig) -> None:
    """Check the options of vLLM if it generates, or may generate.

    Raises:
        ConfigError: the first problem.
    """
    train, backend = config.train, config.engine.backend
    if backend != VLLM and generator_of(train) != "colocated":  # a script's may stand for a server, too
        raise ConfigError(f"engine.backend={backend}: it generates with train.use_vllm=true train.vllm_mode=colocate")
    if train.use_vllm is False:
        return
    if train.vllm_mode not in ("colocate", "server"):
        raise ConfigError(f"train.vllm_mode={train.vllm_mode}: possible: colocate, server")
    fraction = train.vllm_gpu_memory_utilization
    if fraction is not None and not 0 < fraction <= 1:
        raise ConfigError(
            f"train.vllm_gpu_memory_utilization={fraction}: a fraction of the memory, above 0 and at most 1; null "
            "leaves it to the plan"
        )
    for key in ("vllm_server_port", "vllm_group_port"):
        if not 0 < train[key] < 65536:
            raise ConfigError(f"train.{key}={train[key]}: a port from 1 to 65535")
    needed = config.task.max_prompt_length + (train.max_completion_length or 0)  # without one the plan complains
    if train.vllm_max_model_length is not None and train.vllm_max_model_length < needed:
        raise ConfigError(
            f"train.vllm_max_model_length={train.vllm_max_model_length}: a prompt and its completion take up to "
            f"{needed} tokens (task.max_prompt_length and train.max_completion_length); null leaves it to the plan"
        )
    if train.use_vllm and is_quantized(config.peft) and (why := why_merged(config)):
        reason = f"{why} (use engine.lora=adapter)" if why.startswith("engine.lora=") else why
        raise ConfigError(
            f"peft.quantization: {reason}, and an adapter cannot be merged into quantized weights; or use "
            "generation=transformers, or peft=lora"
        )
