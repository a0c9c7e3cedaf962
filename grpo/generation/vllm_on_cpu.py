"""What a colocated vLLM needs on a CPU: room for its cache, weights that can be replaced, faster LoRA layers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from grpo.utils.hardware import host_memory
from grpo.utils.limits import ENGINE
from grpo.utils.patching import patched


def cpu_options(fraction: float, weights: float) -> dict[str, Any]:
    """Return how an engine runs on a CPU: its cache in what the fraction leaves beside weights, without a compiler.

    vLLM's own rule would count all that this process holds as part of the fraction.
    """
    cache = max(fraction * host_memory()[1] - weights - ENGINE, ENGINE / 3)
    kept = "VLLM_CPU_KVCACHE_SPACE" in os.environ  # the user's choice, in GiB
    return {"enforce_eager": True, "block_size": 32} | ({} if kept else {"kv_cache_memory_bytes": int(cache)})


@contextmanager
def loadable() -> Iterator[None]:
    """While inside, an engine on a CPU keeps its weights as they are.

    It packs them otherwise, throws the originals away, and what is synchronized later fails or does not arrive.
    """

    def unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with patched("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", unpacked):
        yield


@contextmanager
def one_adapter() -> Iterator[None]:
    """While inside, an engine on a CPU gets LoRA layers for requests that all have the same adapter."""
    layers = "grpo.generation.cpu_lora.OneAdapter"
    with patched("vllm.platforms.cpu:CpuPlatform.get_punica_wrapper", classmethod(lambda platform: layers)):
        yield
