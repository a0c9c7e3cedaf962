"""vLLM's fraction of a GPU beside the training, and whether it has to sleep during updates: pure arithmetic."""

from dataclasses import replace
from math import ceil, floor

from omegaconf import DictConfig

from grpo.config.transport import engine_rank
from grpo.planning import images
from grpo.planning.adapters import adapter_parameters
from grpo.planning.memory import peak, phases
from grpo.planning.persistent import weights
from grpo.planning.shape import Shape
from grpo.planning.workload import Workload
from grpo.utils.errors import ConfigError
from grpo.utils.limits import ENGINE, GB

USEFUL_TOKENS = 4096
"""Tokens per micro-batch below which small micro-batches cost more time than a sleeping vLLM does."""


def with_vllm(
    train: DictConfig, shape: Shape, workload: Workload, limit: float, shares: bool = False, awake: bool = False
) -> Workload:
    """Return the workload with vLLM's fraction of the GPU; it sleeps during updates if no useful micro-batch fits.

    Args:
        limit: bytes of the device that may be filled.
        shares: whether the policy can have its frozen weights from an engine that does not sleep.
        awake: whether the engine must not sleep.

    Raises:
        ConfigError: the configured fraction does not hold vLLM's weights.
    """
    tried: list[tuple[float, Workload]] = []
    modes = (False,) if awake or workload.quantized else (False, True)  # of quantized weights none can be merged again
    for sleeps in modes if train.vllm_enable_sleep_mode is None else (train.vllm_enable_sleep_mode,):
        sleeps = sleeps and workload.device == "cuda"  # on a CPU it cannot
        workload = replace(workload, vllm_sleeps=sleeps, shares_weights=shares and not sleeps)
        fraction = train.vllm_gpu_memory_utilization
        if fraction and fraction * workload.gpu_memory < copy_of_weights(shape, workload):
            raise ConfigError(
                f"train.vllm_gpu_memory_utilization={fraction}: of {workload.gpu_memory / GB:.1f} GiB that is too "
                f"little for the {copy_of_weights(shape, workload) / GB:.2f} GiB of vLLM's weights; null leaves it to "
                "the plan"
            )
        workload = replace(workload, vllm_fraction=fraction or vllm_fraction(shape, workload, limit))
        busy = replace(workload, tokens=max(workload.tokens, USEFUL_TOKENS))
        needed = peak(shape, busy if workload.device == "cuda" else workload)
        if needed <= limit:
            return workload
        tried.append((needed, workload))
    return min(tried, key=lambda attempt: attempt[0])[1]


def copy_of_weights(shape: Shape, workload: Workload) -> float:
    """Return the bytes of vLLM's own weights per device, quantized like the policy's or to FP8, with an adapter's."""
    bits = 8 if workload.vllm_fp8 else workload.quantized
    total = weights(shape, replace(workload, weight_bytes=workload.compute_bytes, quantized=bits))
    if workload.adapter and workload.sends_adapter:
        adapter = replace(workload.adapter, rank=engine_rank(workload.adapter.rank))
        total += workload.compute_bytes * adapter_parameters(shape, adapter)
    return total / workload.vllm_shards


def vllm_fraction(shape: Shape, workload: Workload, limit: float) -> float:
    """Return vLLM's fraction of the GPU: weights and cache of all sequences, or the memory that training leaves."""
    plain = replace(workload, vllm_fraction=0.0)
    copy = copy_of_weights(shape, workload)
    cache = sum(size for name, size in phases(shape, plain)["rollout"].items() if name == "kv cache")
    awake = phases(shape, plain)["load"] if workload.vllm_sleeps else phases(shape, plain)["update"]
    taken = sum(awake.values())
    if workload.vllm_sleeps:  # beside which the next completions are generated
        elsewhere = phases(shape, replace(plain, on_server=True))["rollout"]
        taken += elsewhere.get("optimizer", 0.0) + elsewhere.get("pixel values", 0.0)
    fixed = copy + ENGINE + images.profiled(shape.vision, workload)
    least, wanted = ((fixed + part) / workload.gpu_memory for part in (cache / workload.sequences, cache))
    left = (limit - taken) / workload.gpu_memory
    return max(ceil(100 * least), min(ceil(100 * wanted), floor(100 * left))) / 100
