"""The linear modules of a policy that get no adapters of their own accord."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners import tuners_utils
from torch.nn import Linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from grpo.model.vision import takes_images
from grpo.utils.errors import ConfigError

OWN_CODE = "it needs Python code of its own, which never runs here; use a model of an architecture of transformers"


def config_of(name: str, revision: str | None) -> PretrainedConfig:
    """Return the configuration of a model.

    Raises:
        ConfigError: there is none, or it names Python code.
    """
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{name}: {OWN_CODE if 'custom code' in reason else reason}") from error


@functools.cache
def architecture_of(name: str, revision: str) -> PreTrainedModel:
    """Return a model without its weights; ConfigError if its architecture is unknown."""
    config = config_of(name, revision)
    auto = AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config)


def pattern_of(modules: Sequence[str]) -> str | None:
    """Return a pattern of the names of modules and of all within them, None for no module."""
    return "|".join(f"{re.escape(name)}(\\..*)?" for name in modules) or None


def unfit(model: PreTrainedModel) -> list[str]:
    """Return the names of linear modules among all that PEFT cannot adapt.

    PEFT refuses modules whose weights Mamba's kernels read by themselves. Routers of Phi-3.5-MoE and Llama 4 return
    more than a product. Of Jamba's routers transformers records the output of each `Linear`, an adapter's, too.
    """
    recorded = [name for module in model.modules() for name in recorded_linears(module)]
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]
    return [
        name
        for name, module in linears
        if refused(model, name)
        or read_by_kernel(model, name)
        or not multiplies(module)
        or any(part in name for part in recorded)
    ]


def check_parameters(model: PreTrainedModel, ends: Sequence[str]) -> None:
    """Check that parameters of a model have names with these ends, which PEFT would leave out in silence.

    Raises:
        ConfigError: one end is that of no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    stacked = {".".join(name.split(".")[-2:]) for name, weight in model.named_parameters() if weight.dim() == 3}
    for end in ends:
        if not any(f".{name}".endswith(f".{end}") for name in names):
            of_experts = (
                f"; its experts have {', '.join(sorted(stacked))}" if stacked else "; it has no stacked experts"
            )
            raise ConfigError(f"peft.target_parameters: no parameter of the model is named {end}{of_experts}")


def recorded_linears(module: Any) -> list[str]:
    """Return parts of the names of the linear modules whose outputs transformers records for a model."""
    recorders = (getattr(module, "_can_record_outputs", None) or {}).values()
    return [
        recorder.layer_name
        for recorder in recorders
        if getattr(recorder, "target_class", None) is Linear and recorder.layer_name
    ]


def refused(model: PreTrainedModel, name: str) -> bool:
    """Return whether PEFT refuses to adapt a module of a model."""
    try:
        tuners_utils._check_lora_target_modules_mamba(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False


def check_modules(model: PreTrainedModel, ends: Sequence[str]) -> None:
    """Check that named modules can have adapters.

    Raises:
        ConfigError: kernels of Mamba would compute without the adapter of one of them.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, Linear)
            and name.endswith(tuple(f".{end}" for end in ends))
            and read_by_kernel(model, name)
        ):
            raise ConfigError(
                f"peft.target_modules: kernels of Mamba read the weight of {name.rpartition('.')[2]} by themselves, "
                "without its adapter; leave it out"
            )


def read_by_kernel(model: PreTrainedModel, name: str) -> bool:
    """Return whether a kernel of Mamba reads a module's weight by itself, in families that PEFT does not know."""
    owner, _, own_name = name.rpartition(".")
    parts = {key for key, _ in model.get_submodule(owner).named_parameters(recurse=False)}
    return own_name == "out_proj" and {"A_log", "D"} <= parts


def multiplies(module: Linear) -> bool:
    """Return whether a module returns the product with its weight, as adapters expect."""
    if type(module).forward is Linear.forward:
        return True
    try:
        output = module(torch.empty(1, module.in_features, dtype=module.weight.dtype, device=module.weight.device))
    except Exception:  # whatever a module of another shape makes of a matrix
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)
