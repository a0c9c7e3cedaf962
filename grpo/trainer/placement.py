"""Where the weights of a policy are, and of which type, before it is trained."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import accelerate.accelerator
import torch
from accelerate.utils import fsdp_utils, is_peft_model
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo.trainer.adapter_inputs import keep_inputs_uncast
from grpo.trainer.shared_prompts.states import state_layers
from grpo.trainer.tiled_mlp import tile_mlps
from grpo.utils.attention import policy_of
from grpo.utils.patching import patched, replaced

EXPERTS = ("num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations that do not call it `num_experts`."""


def prepare(trainer: Any) -> None:
    """Prepare the weights of a trainer's policy, and of its reference, before accelerate wraps them.

    Raises:
        ValueError: accelerate has spread them over several devices.
    """
    model = trainer.model
    check_one_device(model)
    for policy in filter(None, (model, trainer.ref_model)):
        show_to_trl(policy)
        if is_deepspeed_zero3_enabled():
            gather_with_layers(policy)
    balance_routers_alone(trainer)
    keep_differentiable(model)
    if trainer.update.mlp_tile:
        tile_mlps(trainer.update.mlp_tile, model, trainer.ref_model)
    if trainer.args.fp16 or getattr(model, "is_quantized", False):
        train_in_float32(model)
    keep_inputs_uncast(model)
    if trainer.accelerator.is_fsdp2:
        prepare_for_fsdp(model)


def check_one_device(model: torch.nn.Module) -> None:
    """Check that the layers of the policy are on one device.

    Raises:
        ValueError: accelerate has spread them over several.
    """
    devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
    if len(devices) > 1:
        raise ValueError(
            f"the layers of the policy are spread over several devices ({', '.join(sorted(devices))}): set "
            "CUDA_VISIBLE_DEVICES to one GPU before CUDA is initialised, or start the script with torchrun or "
            "accelerate launch; if one GPU is too small for the policy, use LoRA, QLoRA or a smaller model"
        )


def prepare_for_fsdp(model: torch.nn.Module) -> None:
    """Let FSDP2 shard a policy by the layers that it has, and let transformers generate with it.

    accelerate refuses a model that names a class of layers which is not in it, as LLaVA's tower does. Without the mark
    as managed, generation does not wait for the processes whose completions are longer.
    """
    base = model.get_base_model() if is_peft_model(model) else model
    there = {type(module).__name__ for module in model.modules()}
    base._no_split_modules = sorted(there.intersection(base._no_split_modules or ()))
    base._is_fsdp_managed_module = True


def gather_with_layers(model: torch.nn.Module) -> None:
    """Let ZeRO-3 gather the weights of a convolution with the layer that uses them without calling it.

    DeepSpeed finds such weights where they are not there yet. Small ones are, until a reference moves: the order in
    which it gathers, recorded before, would then be another one.
    """
    from deepspeed.runtime.zero import register_external_parameter

    for layer in state_layers(model):
        for convolution in (module for module in layer.modules() if isinstance(module, torch.nn.Conv1d)):
            for weight in convolution.parameters():
                register_external_parameter(layer, weight)


def show_to_trl(model: torch.nn.Module) -> None:
    """Name the parts of a policy for TRL's head, which asks all families for them by the same names.

    Llama 4 calls its decoder `language_model` and has none, so that TRL would take the whole model for it. Granite's
    mixtures and Phi-3.5-MoE, among others, have another name for the number of their experts.
    """
    base = policy_of(model)  # the reference may be in an engine of DeepSpeed
    if base.base_model is base:
        embedding = base.get_input_embeddings()
        base.base_model_prefix = next(name for name, part in base.named_children() if embedding in part.modules())
    config = base.config.get_text_config()
    name = next((name for name in EXPERTS if hasattr(config, name)), None)
    if name and not hasattr(config, "num_experts"):
        known = config.attribute_map.get(name, name)
        type(config).attribute_map = {**config.attribute_map, "num_experts": known}


def balance_routers_alone(trainer: Any) -> None:
    """Drop the loss of routers of a policy without any.

    TRL adds it to all members of a family with experts, also to those without: Granite 4, Jamba and Doge.
    """
    trainer.aux_loss_enabled = trainer.aux_loss_enabled and has_router(trainer.model)


def has_router(model: torch.nn.Module) -> bool:
    """Return whether transformers can record the logits of any router of a policy."""
    for part in model.modules():
        recorders = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind: Any = getattr(recorder, "target_class", recorder)
            name = getattr(recorder, "layer_name", None) or ""
            if any(isinstance(module, kind) and name in path for path, module in part.named_modules()):
                return True
    return False


def train_in_float32(model: torch.nn.Module) -> None:
    """Make trained weights float32.

    In float16 a gradient scaler cannot unscale gradients in half precision. TRL makes the adapters of a quantized base
    bfloat16, whose 8 bits a step of a small learning rate does not change.
    """
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


def keep_differentiable(model: torch.nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on the CPU, which would lose gradients without a word.

    On a CPU with AVX512-BF16, `Linear4bit` repacks its weights at the first forward pass in evaluation mode, that is at
    the first rollout, and the product with repacked weights has no derivative: later updates would see only what the
    residual connections carry.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def gathered_with_its_norm() -> AbstractContextManager[None]:
    """Return a context in which accelerate shards an output layer together with the norm before it.

    TRL multiplies by the weight of that layer without calling it, so that only the norm gathers it. accelerate finds no
    norm in a policy that sees images, whose language model has it. TRL would gather the weight by itself then, and each
    process would add the gradient of its own completions alone to its shard.
    """
    stock = fsdp_utils._find_final_norm

    def final_norm(model: Any) -> Any:
        language_model = getattr(getattr(model, model.base_model_prefix, None), "language_model", None)
        norms = [part for part in language_model.children() if "Norm" in type(part).__name__] if language_model else []
        return norms[-1] if norms else stock(model)

    return patched("accelerate.utils.fsdp_utils:_find_final_norm", final_norm)


def sent_by_rank_0() -> AbstractContextManager[None]:
    """Return a context in which accelerate divides a policy whose weights only rank 0 holds in float32.

    accelerate casts trained weights to float32 in each process before FSDP2 divides them. Here the other processes have
    no weights by then, and get their shards from rank 0, weight by weight (`fsdp2_load_full_state_dict`). A policy with
    buffers that are saved, or with quantized weights, which accelerate cannot send, is divided as before.
    """
    stock = accelerate.accelerator.fsdp2_prepare_model

    def prepare_model(accelerator: Any, model: torch.nn.Module) -> torch.nn.Module:
        weights = dict(model.named_parameters(remove_duplicate=False))
        plain = all(type(weight) is torch.nn.Parameter and weight.device.type == "cpu" for weight in weights.values())
        if not plain or model.state_dict().keys() - weights:
            return stock(accelerator, model)
        if not accelerator.is_main_process:
            drop_weights(model)
        with replaced(accelerator.state.fsdp_plugin, "cpu_ram_efficient_loading", True):
            return stock(accelerator, model)

    return patched("accelerate.accelerator:fsdp2_prepare_model", prepare_model)


def drop_weights(model: torch.nn.Module) -> None:
    """Replace all weights of a model by shapes without memory; tied weights stay tied."""
    shapes: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            empty = torch.nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            setattr(module, name, shapes.setdefault(id(weight), empty))


def loads_without_state() -> AbstractContextManager[None]:
    """Return a context in which FSDP2 loads an optimizer that has no state for weights that never had a gradient.

    A tower whose features come from its last layer but one, as LLaVA's, has such weights. PyTorch refuses a state
    without them by default.
    """
    stock = fsdp_utils._prepare_sd_options

    def options(plugin: Any) -> Any:
        of_accelerate = stock(plugin)
        return of_accelerate and replace(of_accelerate, strict=False)

    return patched("accelerate.utils.fsdp_utils:_prepare_sd_options", options)
