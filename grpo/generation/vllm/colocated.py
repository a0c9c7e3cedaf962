"""Settings of a colocated vLLM: its data type and port; on a CPU its cache, replaceable weights, faster LoRA layers."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo.config.transport import HALF_ADAPTERS
from grpo.utils.hardware import host_memory
from grpo.utils.limits import ENGINE
from grpo.utils.patching import patched

COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


def cpu_options(fraction: float, weights: float) -> dict[str, Any]:
    """Return the options of an engine on a CPU: its cache takes its fraction of memory less the weights; no compiler.

    vLLM's own rule would count all memory of this process as part of the fraction.
    """
    cache = max(fraction * host_memory()[1] - weights - ENGINE, ENGINE / 3)
    is_set = "VLLM_CPU_KVCACHE_SPACE" in os.environ  # the user's choice, in GiB
    return {"enforce_eager": True, "block_size": 32} | ({} if is_set else {"kv_cache_memory_bytes": int(cache)})


@contextmanager
def loadable() -> Iterator[None]:
    """Context in which an engine on a CPU keeps the layout of its weights.

    Otherwise it packs the weights and discards the originals, and later transfers fail or are lost.
    """

    def unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with patched("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", unpacked):
        yield


@contextmanager
def one_adapter() -> Iterator[None]:
    """Context in which an engine on a CPU uses LoRA layers for requests with a single adapter."""
    layers = "grpo.generation.vllm.cpu_lora.OneAdapter"
    with patched("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper", classmethod(lambda platform: layers)):
        yield


def compute_type(accelerator: Any, model: torch.nn.Module) -> str:
    """Return the data type in which policy and engine compute."""
    return COMPUTE.get(accelerator.mixed_precision, str(model.dtype).removeprefix("torch."))


def check_kernels(dtype: str, on_gpu: bool, sends_adapter: bool) -> None:
    """Raise a ValueError if vLLM's kernels cannot compute an adapter in this type."""
    if sends_adapter and on_gpu and dtype == "float32":
        raise ValueError(f"engine.lora=adapter: {HALF_ADAPTERS}; use engine.lora=merged")


def free_port() -> str:
    """Return a free port.

    TRL tries the same four ports for each engine, so one of two runs that start at the same time on a machine would
    fail.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def leave_groups() -> None:
    """Leave vLLM's groups of processes, and PyTorch's, of which NCCL warns if it is left to the end of the process."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
