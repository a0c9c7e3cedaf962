"""Model, quantization and adapter: what `conf/model` and `conf/peft` become for TRL."""

from pathlib import Path
from typing import Any

import httpx
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from grpo.config import ConfigError

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def make_available(model: DictConfig) -> None:
    """Download the model, with a progress bar, unless it is a folder.

    Raises:
        ConfigError: it is neither a folder nor a model on the hub.
    """
    name = model.model_name_or_path
    if Path(name).is_dir():
        return
    try:
        snapshot_download(name, revision=model.model_revision, allow_patterns=FILES)
    except (OSError, HfHubHTTPError, HFValidationError, httpx.HTTPError) as error:
        raise ConfigError(
            f"model.model_name_or_path={name}: neither a folder nor a model that can be reached on the hub "
            f"({str(error).strip().splitlines()[0]})"
        ) from error


def model_init_kwargs(model: DictConfig) -> dict[str, Any]:
    """Return the arguments with which TRL loads the policy, and the reference if there is one."""
    return {
        "revision": model.model_revision,
        "dtype": model.dtype,
        "attn_implementation": model.attn_implementation,
        "use_safetensors": True,
    }


def peft_config(peft: DictConfig | None) -> LoraConfig | None:
    """Return the adapter's configuration, or None to train every weight."""
    if peft is None:
        return None
    options: dict[str, Any] = OmegaConf.to_container(peft, resolve=True)  # type: ignore[assignment]
    options.pop("quantization", None)
    return LoraConfig(**options)


def quantization_config(peft: DictConfig | None) -> BitsAndBytesConfig | None:
    """Return how the base's weights are quantized, or None if they are not."""
    if peft is None or not peft.get("quantization"):
        return None
    options: dict[str, Any] = OmegaConf.to_container(peft.quantization, resolve=True)  # type: ignore[assignment]
    return BitsAndBytesConfig(**options)


def keep_differentiable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on the CPU, which would lose gradients without a word.

    On a CPU with AVX512-BF16, `Linear4bit` repacks its weights at the first forward pass in evaluation mode, that is at
    the first rollout, and the product with repacked weights has no derivative: later updates would see only what the
    residual connections carry.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
