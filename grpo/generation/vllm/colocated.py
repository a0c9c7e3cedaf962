"""A vLLM in the training process: the weights that it gets and holds, and its settings.

An engine on a CPU needs a size for its cache, weights that can be replaced, and faster LoRA layers.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import PeftModel

from grpo.config.transport import HALF_ADAPTERS
from grpo.generation.vllm.checked_transfer import NOT_APPLIED, CheckedAdapter
from grpo.generation.vllm.held_weights import HeldWeights, adapters_of, applied
from grpo.generation.vllm.policy_weights import adapter_file
from grpo.utils.errors import GenerationError
from grpo.utils.hardware import host_memory
from grpo.utils.limits import ENGINE
from grpo.utils.patching import patched

COMPUTE = {"bf16": "bfloat16", "fp16": "float16"}


class Colocated:
    """A vLLM in this process, with the policy's weights; see `RunningServer`, which has the same methods.

    Args:
        llm: vLLM's `LLM`.
        policy: the policy, with its adapter if it has one.
        sends_adapter: whether vLLM gets the adapter alone.
        shares: whether the policy gets its frozen weights from vLLM.
        divided: whether several processes divide vLLM's weights.
    """

    def __init__(
        self, llm: Any, policy: torch.nn.Module, sends_adapter: bool, shares: bool = False, divided: bool = False
    ) -> None:
        self.llm, self.runner = llm, llm.llm_engine.model_executor.driver_worker.model_runner
        self.version, self._shares = 0, shares
        self.held = None if sends_adapter else HeldWeights(self.runner.model)
        self.checked_adapter: Any = None
        if sends_adapter:
            self.checked_adapter = CheckedAdapter(policy, self.runner.model, shares, divided)

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While inside, TRL writes all weights."""
        yield
        self.llm.llm_engine.reset_encoder_cache()  # of images, as the tower's weights saw them before

    def load_adapter(self, policy: PeftModel, weights: dict[str, torch.Tensor]) -> None:
        """Load the adapter under a new name, and remove the old one; see `RunningServer.load_adapter`.

        Raises:
            GenerationError: vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest

        self.version += 1
        with adapter_file(policy, weights) as folder:
            request = LoRARequest(f"policy-{self.version}", self.version, str(folder))
            if not self.llm.llm_engine.add_lora(request):
                raise GenerationError("vLLM did not take the adapter: use engine.lora=merged")
        if self.version > 1:
            self.llm.llm_engine.remove_lora(self.version - 1)
        self.llm.generate = partial(type(self.llm).generate, self.llm, lora_request=request)

    def differing_adapter(self, policy: PeftModel, weights: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the adapter's weights that vLLM holds otherwise, and of changed frozen weights."""
        return self.checked_adapter.differing(adapters_of(self.runner), self.version, weights)

    def check_used(self) -> None:
        """Raise a GenerationError if vLLM has not applied the adapter, where it gets the adapter alone."""
        if self.checked_adapter and applied(adapters_of(self.runner)) != [self.version]:
            raise GenerationError(NOT_APPLIED)

    def changed_weights(self) -> list[str]:
        """Return the names of weights that it shares with the policy, and that something has written to."""
        return self.checked_adapter.frozen.changed() if self._shares else []


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
