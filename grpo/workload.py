"""From a composed configuration to what its memory follows from: the model's shape and the job."""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo.config import ROOT, ConfigError
from grpo.job import UNMEASURED, Adapter, Job
from grpo.shape import Shape, shape_of

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
DEFAULT_OPTIMIZER = "adamw_torch_fused"


@functools.cache
def shipped_models() -> dict[str, tuple[str, Shape]]:
    """Return name on the hub and shape of each choice of `conf/model` but the embedded one."""
    files = sorted((ROOT / "conf" / "model").glob("*.yaml"))
    choices = {file.stem: OmegaConf.load(file) for file in files if file.stem != "tiny"}
    return {stem: (choice.model_name_or_path, shape_of(choice.shape)) for stem, choice in choices.items()}


def find_shape(model: DictConfig) -> Shape:
    """Return the model's shape: from its folder, `conf/model`, `model.shape`, or the hub's `config.json`.

    Raises:
        ConfigError: none of these has it, or it is not a shape.
    """
    name = model.model_name_or_path
    shipped = dict(shipped_models().values())
    embedded = shape_of(OmegaConf.load(ROOT / "conf" / "model" / "tiny.yaml").model.shape)
    file = Path(name) / "config.json"
    try:
        if file.is_file():
            return shape_of(json.loads(file.read_text()))
        if name in shipped:
            return shipped[name]
        if model.shape and (given := shape_of(model.shape)) not in (embedded, *shipped.values()):
            return given  # else it belongs to the choice that the name was typed over
    except ValueError as error:
        raise ConfigError(f"model.shape of {name}: {error}") from error
    return from_hub(name, model.model_revision)


def from_hub(name: str, revision: str) -> Shape:
    """Return a hub model's shape, from the cache if it is there."""
    from huggingface_hub import hf_hub_download  # a quarter of a second, which most plans do not need

    try:
        return shape_of(json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text()))
    except Exception as error:  # whatever network, hub and cache can raise
        raise ConfigError(
            f"model.model_name_or_path={name}: neither a folder nor a model whose config.json can be had from the hub "
            f"({str(error).strip().splitlines()[0][:120]}); name a folder that holds the model, or give its "
            "+model.shape.hidden_size=… and the other numbers, as in conf/model"
        ) from error


def job_of(config: DictConfig, device: str) -> Job:
    """Return the job that a configuration describes, for one process on a `cuda` or `cpu` device.

    Raises:
        ConfigError: a number that memory follows from is missing or not positive.
    """
    train, peft = config.train, config.peft
    for key, value in {
        "task.max_prompt_length": config.task.max_prompt_length,
        "train.max_completion_length": train.max_completion_length,
        "plan.processes": processes(config),
    }.items():
        if not value or value < 1:
            raise ConfigError(f"{key}={value}: the plan needs a positive number")
    if config.model.dtype not in (*BYTES, "auto"):
        raise ConfigError(f"model.dtype={config.model.dtype}: possible: auto, {', '.join(BYTES)}")
    size = BYTES.get(config.model.dtype, 2)
    half = train.bf16 or train.fp16 or train.bf16 is None
    quantized = bool(peft and peft.get("quantization"))
    tokens = config["update"].max_tokens_per_microbatch
    colocated = train.use_vllm and train.vllm_mode == "colocate"
    share = train.generation_batch_size or processes(config) * train.per_device_train_batch_size * (
        train.steps_per_generation or train.gradient_accumulation_steps
    )
    return Job(
        prompt=config.task.max_prompt_length,
        completion=train.max_completion_length,
        rows=-(-share // processes(config)),
        tokens=UNMEASURED if tokens == "auto" else tokens,
        completions_a_sequence=train.num_generations if config["update"].share_prompts else 1,
        weight_bytes=size,
        compute_bytes=2 if half else size,
        quantized=quantized,
        double_quantized=bool(quantized and peft.quantization.get("bnb_4bit_use_double_quant")),
        adapter=adapter_of(peft, quantized) if peft else None,
        optimizer=train.optim or DEFAULT_OPTIMIZER,
        checkpointing=train.gradient_checkpointing,
        reference=bool(train.beta) and not peft,
        gradients_on_host=config["update"].gradients_on_host,
        vllm_share=(train.vllm_gpu_memory_utilization or 0.0) if colocated else 0.0,
        vllm_sleeps=train.vllm_enable_sleep_mode,
        vllm_shards=train.vllm_tensor_parallel_size,
        sampling_filter=bool(train.top_k) or train.top_p < 1 or train.min_p is not None,
        device=device,
        processes=min(processes(config), int(os.environ.get("LOCAL_WORLD_SIZE", "1024"))),
        **sharding(config),
    )


def adapter_of(peft: DictConfig, quantized: bool) -> Adapter:
    """Return the adapter that the options of `peft.LoraConfig` describe."""
    modules = peft.get("target_modules", "all-linear")
    names = None if isinstance(modules, str) else tuple(modules)
    rank = peft.get("r", 8)
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"peft.r={rank}: a positive number is needed")
    return Adapter(rank, names, 2 if quantized else 4)


def processes(config: DictConfig) -> int:
    """Return how many processes train: as planned for, or as started."""
    return int(os.environ.get("WORLD_SIZE", "1")) if config.plan.processes is None else config.plan.processes


def sharding(config: DictConfig) -> dict[str, Any]:
    """Return how FSDP or DeepSpeed, as TRL or `accelerate launch` is told, spreads a model over the processes."""
    train, env, count = config.train, os.environ, processes(config)
    fsdp = str(train.fsdp or ("full_shard" if env.get("ACCELERATE_USE_FSDP") == "true" else "")).lower()
    stage, offload, offload_optimizer = 0, False, False
    if fsdp and fsdp != "false":
        options = train.fsdp_config if isinstance(train.fsdp_config, DictConfig) else {}
        kept = "shard_grad_op" in fsdp or env.get("FSDP_SHARDING_STRATEGY", "") == "SHARD_GRAD_OP"
        kept = kept or False in (options.get("reshard_after_forward"), env.get("FSDP_RESHARD_AFTER_FORWARD") != "false")
        stage = 2 if kept else 3
        offload = "offload" in fsdp or bool(options.get("cpu_offload")) or env.get("FSDP_OFFLOAD_PARAMS") == "true"
    elif train.deepspeed:
        zero = deepspeed(train.deepspeed).get("zero_optimization", {})
        stage = zero.get("stage", 0)
        offload = (zero.get("offload_param") or {}).get("device", "none") != "none"
        offload_optimizer = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    elif env.get("ACCELERATE_USE_DEEPSPEED") == "true":
        stage = int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
        offload = env.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") != "none"
        offload_optimizer = env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none") != "none"
    return {
        "weight_shards": count if stage == 3 else 1,
        "gradient_shards": count if stage >= 2 else 1,
        "optimizer_shards": count if stage >= 1 else 1,
        "offload_weights": offload,
        "offload_optimizer": offload or offload_optimizer,
    }


def deepspeed(setting: Any) -> Mapping[str, Any]:
    """Return DeepSpeed's options, which may be in a file."""
    if isinstance(setting, DictConfig):
        return setting
    try:
        return json.loads(Path(setting).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"train.deepspeed={setting}: {error}") from error
