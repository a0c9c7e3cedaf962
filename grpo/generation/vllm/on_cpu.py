"""Settings of a colocated vLLM on a CPU: room for its cache, replaceable weights, faster LoRA layers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo.utils.hardware import host_memory
from grpo.utils.limits import ENGINE
from grpo.utils.patching import patched


def cpu_options(fraction: float, weights: float) -> dict[str, Any]:
    """Return the options of an engine on a CPU: its cache takes its fraction of memory less the weights; no compiler.

    vLLM's own rule would count all memory of this process as part of the fraction.
    """
    cache = max(fraction * host_memory()[1] - weights - ENGINE, ENGINE / 3)
    kept = "VLLM_CPU_KVCACHE_SPACE" in os.environ  # the user's choice, in GiB
    return {"enforce_eager": True, "block_size": 32} | ({} if kept else {"kv_cache_memory_bytes": int(cache)})


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
