"""Model, quantization and adapter: from `conf/model` and `conf/peft` to TRL's arguments."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
)

from grpo.model.adapted import (
    OWN_CODE,
    architecture_of,
    check_modules,
    check_parameters,
    config_of,
    pattern_of,
    unfit,
)
from grpo.model.thinking import named_as_in
from grpo.model.vision import parts, takes_images
from grpo.utils.device import kind_of_device
from grpo.utils.errors import ConfigError

log = logging.getLogger(__name__)
FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def download(name: str, revision: str | None = None) -> None:
    """Download a model, with a progress bar, unless it is a folder.

    Raises:
        ConfigError: it is neither a folder nor a model on the hub.
    """
    if Path(name).is_dir():
        return
    try:
        snapshot_download(name, revision=revision, allow_patterns=FILES)
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
        "trust_remote_code": False,
    }


def without_weights(model: DictConfig) -> PreTrainedModel:
    """Return the policy on its training device, with weights that take no memory: a single repeated number per weight.

    The engine's weights replace them (`grpo.generation.vllm.shared_weights`). Buffers have their values.
    """
    name, revision = model.model_name_or_path, model.model_revision
    architecture = config_of(name, revision)
    options = {"dtype": getattr(torch, model.dtype), "attn_implementation": model.attn_implementation}
    with init_empty_weights(include_buffers=False):
        policy = AutoModelForCausalLM.from_config(architecture, **options)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    for module in policy.modules():
        for key, weight in module._parameters.items():
            if weight is not None:
                number = torch.zeros((), dtype=weight.dtype, device=device)
                module._parameters[key] = torch.nn.Parameter(number.expand(weight.shape))
    policy.tie_weights()
    with suppress(OSError):  # a model without one has what its configuration says
        policy.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
    return policy.to(device)


def load_processing_class(model: DictConfig, name: str | None = None, template: Mapping[str, Any] | None = None) -> Any:
    """Return the tokenizer of the configured model, or of another model or adapter; its processor if it takes images.

    Args:
        model: the `model` group.
        name: of another model, or a folder.
        template: arguments of the chat template, of `template_of`, with which every prompt is then built.

    Raises:
        ConfigError: there is none, torchvision is missing, which Qwen's processors need, or `task.thinking` is not for
            this model.
    """
    name = name or model.model_name_or_path
    revision = model.model_revision if name == model.model_name_or_path else None
    try:
        options = {"truncation_side": "left", "padding_side": "left", "trust_remote_code": False}
        processing_class = AutoProcessor.from_pretrained(name, revision=revision, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ImportError) and "torchvision" in reason.casefold():
            reason = "its processor needs torchvision: pip install -c constraints.txt -e '.[images]'"
        if "preprocessor_config.json" in reason:
            reason = "the model takes images, and its processor is missing (preprocessor_config.json)"
        if "custom code" in reason:
            reason = OWN_CODE
        raise ConfigError(f"{name}: {reason}") from error
    if template:
        arguments = named_as_in(getattr(processing_class, "chat_template", None), template, name)
        processing_class.apply_chat_template = partial(processing_class.apply_chat_template, **arguments)
    return processing_class


def adapter_config(name: str | Path) -> dict[str, Any] | None:
    """Return the content of `adapter_config.json` in a folder; None if the folder has no adapter."""
    file = Path(name) / "adapter_config.json"
    return json.loads(file.read_text()) if file.is_file() else None


def load(
    name: str | Path,
    config: DictConfig,
    dtype: str | None = None,
    device: str | None = None,
    quantization: BitsAndBytesConfig | None = None,
    template: Mapping[str, Any] | None = None,
    merge: bool = True,
) -> tuple[PreTrainedModel, Any]:
    """Load a model, or an adapter and its base, with its tokenizer or processor.

    Args:
        name: a folder, or a name on the hub.
        config: the `model` group; its revision applies if `name` is the model of the configuration.
        dtype: data type of the weights; None takes the configuration's.
        device: None takes the GPU if there is one.
        template: as of `load_processing_class`.
        merge: whether an adapter is merged into its base, unless that is quantized.

    Raises:
        ConfigError: the model does not exist, or not as safetensors.
    """
    adapter = adapter_config(name)
    base = str(adapter["base_model_name_or_path"] if adapter else name)
    revision = config.model_revision if base == config.model_name_or_path else "main"
    download(base, revision)
    transformers.utils.logging.disable_progress_bar()
    options = {"attn_implementation": config.attn_implementation, "use_safetensors": True, "trust_remote_code": False}
    architecture = config_of(base, revision)
    try:
        auto = AutoModelForImageTextToText if takes_images(architecture) else AutoModelForCausalLM
        dtype = dtype or config.dtype
        model = auto.from_pretrained(base, revision=revision, dtype=dtype, quantization_config=quantization, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"{base}: {' '.join(str(error).split())}") from error
    processing_class = load_processing_class(config, str(name), template)
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if tokenizer.pad_token is None:  # as TRL does
        tokenizer.pad_token = tokenizer.eos_token
    if adapter:
        if not (Path(name) / "adapter_model.safetensors").is_file():
            raise ConfigError(f"{name}: the adapter's weights are not there as safetensors")
        model = PeftModel.from_pretrained(model, name)
        if merge and quantization is None:
            model = model.merge_and_unload(safe_merge=True)
    if quantization is None:
        model = model.to(device or kind_of_device())
    return model.eval(), processing_class


def peft_config(peft: DictConfig | None, model: DictConfig) -> LoraConfig | None:
    """Return the adapter's configuration, or None to train every weight.

    Of a vision-language model the language model has adapters; with `peft.vision` all of it has. `all-linear` means
    the modules that PEFT can adapt.

    Raises:
        ConfigError: a name of `peft.target_parameters` is that of no parameter, or one of `peft.target_modules` is that
            of a weight without an adapter in Mamba's kernels.
    """
    if peft is None:
        return None
    options: dict[str, Any] = OmegaConf.to_container(peft, resolve=True)  # type: ignore[assignment]
    options.pop("quantization", None)
    vision, all_linear = options.pop("vision", False), options.get("target_modules") == "all-linear"
    if parameters := options.get("target_parameters"):
        check_parameters(architecture_of(model.model_name_or_path, model.model_revision), parameters)
    if not options.get("exclude_modules"):
        architecture = architecture_of(model.model_name_or_path, model.model_revision)
        if not isinstance(targets := options.get("target_modules") or [], str):
            check_modules(architecture, targets)
        without = unfit(architecture) if all_linear else []
        if without:
            log.warning(
                "no adapters on %s: PEFT cannot adapt them",
                ", ".join(sorted({name.rpartition(".")[2] for name in without})),
            )
        without += [] if vision else chain.from_iterable(parts(architecture).values())
        options["exclude_modules"] = pattern_of(without)
    return LoraConfig(**options)


def quantization_config(peft: DictConfig | None) -> BitsAndBytesConfig | None:
    """Return how the base's weights are quantized, or None if they are not."""
    if peft is None or not peft.get("quantization"):
        return None
    options: dict[str, Any] = OmegaConf.to_container(peft.quantization, resolve=True)  # type: ignore[assignment]
    return BitsAndBytesConfig(**options)
