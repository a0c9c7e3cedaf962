"""The weights of a policy under the names that vLLM knows, sharded or not."""

from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager

import torch
from accelerate.utils import is_peft_model
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from grpo.generation.vllm.merged_weights import merged_weights


def is_sharded(model: torch.nn.Module, is_zero3: bool) -> bool:
    """Whether a policy's weights are; before training starts, FSDP has not sharded anything yet."""
    return (
        is_zero3
        or any(isinstance(weight, DTensor) for weight in model.parameters())
        or any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    )


def unsharded(weight: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a weight that FSDP2 may shard, unsharded, on a device if given; a collective call."""
    if not isinstance(weight, DTensor):
        return weight.data
    return (weight.to(device) if device and weight.is_cpu else weight).full_tensor()


def policy_weights(
    model: torch.nn.Module,
    whole: Callable[[list[torch.nn.Parameter]], AbstractContextManager],
    device: torch.device,
    only: Container[str] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and weights, with adapters merged in; sharded weights are unsharded one at a time.

    If the weights are sharded, all processes have to call this.

    Args:
        whole: a context in which parameters that ZeRO-3 shards are complete.
        device: the device on which FSDP2 unshards.
        only: names of the requested weights; None for all.
    """
    if is_peft_model(model):
        yield from merged_weights(model, only)
        return
    for own_name, weight in model.named_parameters():
        name = own_name.replace("_checkpoint_wrapped_module.", "")
        if only is None or name in only:
            with whole([weight]):
                yield name, unsharded(weight, device)
