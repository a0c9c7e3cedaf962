"""The division by FSDP2 or DeepSpeed, as configured for TRL or for `accelerate launch`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo.config.batch import processes
from grpo.planning.workload import Sharding
from grpo.utils.errors import ConfigError


def sharding_of(config: DictConfig) -> Sharding:
    """Return the sharding of a configuration, or of the environment of `accelerate launch`; ConfigError as `read`."""
    train, env = config.train, os.environ
    if str(train.fsdp or env.get("ACCELERATE_USE_FSDP", "")).lower() not in ("", "false"):
        fields = fsdp(train)
    elif train.deepspeed or env.get("ACCELERATE_USE_DEEPSPEED") == "true":
        fields = deepspeed(train)
    else:
        fields = {}
    mixed = train.bf16 or train.fp16 or train.bf16 is None
    return Sharding(processes=processes(config), float32=bool(mixed and fields.get("stage")), **fields)


def fsdp(train: DictConfig) -> dict[str, Any]:
    """Return the choice of `fsdp` and `fsdp_config`, or of accelerate's environment variables."""
    env = os.environ
    strategy = f"{train.fsdp or ''} {env.get('FSDP_SHARDING_STRATEGY', '')}".lower()
    options = read("train.fsdp_config", train.fsdp_config or {})
    options = {key.removeprefix("fsdp_"): value for key, value in options.items()}
    resharded = str(options.get("reshard_after_forward", env.get("FSDP_RESHARD_AFTER_FORWARD", "true"))).lower()
    keeps_weights = "shard_grad_op" in strategy or strategy.endswith(" 2") or resharded == "false"
    if "no_shard" in strategy or strategy.endswith(" 3"):
        return {}
    offloads = (options.get("cpu_offload"), options.get("offload_params"), env.get("FSDP_OFFLOAD_PARAMS") == "true")
    offload = "offload" in strategy or any(value is True for value in offloads)
    stage = 2 if keeps_weights else 3
    return {"library": "fsdp", "stage": stage, "offload_weights": offload, "offload_optimizer": offload}


def deepspeed(train: DictConfig) -> dict[str, Any]:
    """Return the choice of a DeepSpeed configuration: of `train.deepspeed`, of accelerate, or of its variables."""
    env = os.environ
    file = train.deepspeed or env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if file:
        zero = read("train.deepspeed", file).get("zero_optimization") or {}
        devices = [(zero.get(f"offload_{part}") or {}).get("device", "none") for part in ("param", "optimizer")]
    else:
        zero = {"stage": env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")}
        devices = [env.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") for part in ("PARAM", "OPTIMIZER")]
    stage, live = int(zero.get("stage", 0)), zero.get("stage3_max_live_parameters", 1e9)
    bucket = zero.get("reduce_bucket_size", 5e8)
    return {
        "library": "deepspeed",
        "stage": stage,
        "offload_weights": stage == 3 and devices[0] != "none",
        "offload_optimizer": stage > 0 and devices[1] != "none",
        "gathers_to_generate": stage == 3 and not train.use_vllm and train.ds3_gather_for_generation is not False,
        "live_parameters": 1e9 if live == "auto" else float(live),
        "bucket": None if bucket == "auto" else float(bucket),
    }


def read(key: str, setting: Any) -> Mapping[str, Any]:
    """Return the options of FSDP or DeepSpeed, given directly or as a JSON file; ConfigError if it cannot be read."""
    if isinstance(setting, Mapping | DictConfig):
        return setting
    try:
        return json.loads(Path(setting).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={setting}: {error}") from error
