"""Where the weights of a policy are, and of which type, before it is trained."""

import torch
from accelerate.utils import is_peft_model


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
