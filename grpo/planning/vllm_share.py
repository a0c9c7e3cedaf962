"""How much of a card vLLM gets beside the training, and whether it has to sleep meanwhile: pure arithmetic."""

from dataclasses import replace
from math import ceil, floor

from omegaconf import DictConfig

from grpo.errors import ConfigError
from grpo.limits import ENGINE, GB
from grpo.planning.memory import peak, phases, weights
from grpo.planning.shape import Shape
from grpo.planning.workload import Job

BUSY = 4096
"""Tokens of a micro-batch below which sleeping costs less time than small micro-batches do."""


def with_vllm(train: DictConfig, shape: Shape, job: Job, limit: float) -> Job:
    """Return the job with vLLM's share; it sleeps during updates where it does not fit beside ones of a useful size."""
    for sleeps in (False, True) if train.vllm_enable_sleep_mode is None else (train.vllm_enable_sleep_mode,):
        job = replace(job, vllm_sleeps=sleeps and job.device == "cuda")  # on a CPU it cannot
        given = train.vllm_gpu_memory_utilization
        if given and given * job.card < copy_of_weights(shape, job):
            raise ConfigError(
                f"train.vllm_gpu_memory_utilization={given}: of {job.card / GB:.1f} GB that is too little for the "
                f"{copy_of_weights(shape, job) / GB:.2f} GB of vLLM's weights; null leaves it to the plan"
            )
        job = replace(job, vllm_share=given or vllm_share(shape, job, limit))
        busy = replace(job, tokens=max(job.tokens, BUSY))
        if peak(shape, busy if job.device == "cuda" else job) <= limit:
            break
    return job


def copy_of_weights(shape: Shape, job: Job) -> float:
    """Return the bytes of vLLM's own weights on a device."""
    return weights(shape, replace(job, quantized=0, weight_bytes=job.compute_bytes)) / job.vllm_shards


def vllm_share(shape: Shape, job: Job, limit: float) -> float:
    """Return vLLM's share of the card: its weights and the cache of all rows, or what the training leaves of it."""
    plain = replace(job, vllm_share=0.0)
    copy = copy_of_weights(shape, job)
    cache = sum(size for name, size in phases(shape, plain)["rollout"].items() if name == "kv cache")
    awake = phases(shape, plain)["load"] if job.vllm_sleeps else phases(shape, plain)["update"]
    taken = sum(awake.values()) + (phases(shape, plain)["update"].get("optimizer", 0.0) if job.vllm_sleeps else 0.0)
    least, wanted = ((copy + ENGINE + part) / job.card for part in (cache / job.rows, cache))
    left = (limit - taken) / job.card
    return max(ceil(100 * least), min(ceil(100 * wanted), floor(100 * left))) / 100
