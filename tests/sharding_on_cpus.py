"""What accelerate lacks to shard a policy over processes on CPUs; FSDP2 and DeepSpeed themselves are the real ones."""

import os
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def enable() -> None:
    """Let accelerate take FSDP2 and DeepSpeed for possible where there is no GPU."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    begin, backend = AcceleratorState.__init__, PartialState._prepare_backend

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        begin(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is None and os.environ.get("ACCELERATE_USE_FSDP") == "true":
            from accelerate.utils import FullyShardedDataParallelPlugin

            fsdp_plugin = FullyShardedDataParallelPlugin()
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            if fsdp_plugin.cpu_offload:  # page-locked memory needs a GPU
                fsdp_plugin.cpu_offload = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
            self.fsdp_plugin = fsdp_plugin

    def _prepare_backend(self: Any, *args: Any, **options: Any) -> tuple[str, DistributedType]:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":  # gloo does what it would compile a minute for
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        found = backend(self, *args, **options)
        return ("gloo", DistributedType.MULTI_CPU) if found[0] is None and "LOCAL_RANK" in os.environ else found

    AcceleratorState.__init__ = __init__
    PartialState._prepare_backend = _prepare_backend
