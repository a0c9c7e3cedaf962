"""Where the weights of a policy are, and of which type, before it is trained."""

import torch


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


def train_in_float32(model: torch.nn.Module) -> None:
    """Make trained weights float32.

    In float16 a gradient scaler cannot unscale gradients in half precision. TRL makes the adapters of a quantized base
    bfloat16, whose 8 bits a step of a small learning rate does not change.
    """
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()
