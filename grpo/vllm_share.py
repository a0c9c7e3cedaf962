"""How much of a card vLLM gets beside the training, and whether it has to sleep meanwhile: pure arithmetic."""

from dataclasses import replace

from omegaconf import DictConfig

from grpo.job import Job
from grpo.memory import ENGINE, peak, phases, weights
from grpo.shape import Shape


def with_vllm(train: DictConfig, shape: Shape, job: Job, limit: float) -> Job:
    """Return the job with vLLM's share; it sleeps during updates only where it does not fit beside them."""
    for sleeps in (False, True) if train.vllm_enable_sleep_mode is None else (train.vllm_enable_sleep_mode,):
        job = replace(job, vllm_sleeps=sleeps and job.device == "cuda")  # on a CPU it cannot
        share, enough = vllm_share(shape, job, limit)
        given = train.vllm_gpu_memory_utilization
        job = replace(job, vllm_share=given or share)
        if (given or share >= enough) and peak(shape, job) <= limit:
            break
    return job


def vllm_share(shape: Shape, job: Job, limit: float) -> tuple[float, float]:
    """Return vLLM's share of the card, and the one that is enough beside the update: the cache of half of the rows.

    It gets its weights and the cache of all rows, or what the training leaves of that, and at least that of one row.
    """
    plain = replace(job, vllm_share=0.0)
    copy = weights(shape, replace(job, quantized=False, weight_bytes=job.compute_bytes)) / job.vllm_shards
    cache = sum(size for name, size in phases(shape, plain)["rollout"].items() if name == "kv cache")
    awake = phases(shape, plain)["load"] if job.vllm_sleeps else phases(shape, plain)["update"]
    taken = sum(awake.values()) + (phases(shape, plain)["update"].get("optimizer", 0.0) if job.vllm_sleeps else 0.0)
    least, enough, wanted = ((copy + ENGINE + part) / job.card for part in (cache / job.rows, cache / 2, cache))
    left = (limit - taken) / job.card
    return round(max(least, min(wanted, left)) + 0.005, 2), enough
