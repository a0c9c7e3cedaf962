"""Host memory of a run: of all processes on a machine. Arithmetic, no torch; bytes unless stated otherwise."""

from math import ceil, log2

from grpo.planning.images import decoded
from grpo.planning.persistent import HOST, Components, held, optimizer_state, trained, weights
from grpo.planning.shape import Shape
from grpo.planning.workload import Workload
from grpo.utils.limits import PINNED_PIECE


def host(shape: Shape, workload: Workload) -> Components:
    """Return bytes of host memory by component, in the larger of two moments: loading and training.

    It excludes the memory of the devices, also if a device shares the host's memory.
    """
    processes = {"processes": HOST[workload.device] * workload.processes}
    loading = processes | {"loading": loaded(shape, workload)}
    images = workload.processes * decoded(shape.vision, workload)
    training = processes | offloaded(shape, workload) | {"images": images}
    larger = max(loading, training, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in larger.items() if size}


def loaded(shape: Shape, workload: Workload) -> float:
    """Bytes of the weights that all processes of a machine have in host memory before they move them to the device.

    Each of several processes reads the model first (TRL's `device_map=None`). safetensors maps its files, so the
    processes share a copy. FSDP2, however, trains in float32, and before accelerate divides the weights, rank 0 has
    cast all of them (`grpo.trainer.placement.sent_by_rank_0`; measured by benchmarks/loading.py).
    """
    if workload.device == "cpu" or workload.sharding.processes == 1:
        return 0.0
    shared = weights(shape, workload)
    if workload.sharding.library == "fsdp" and workload.sharding.float32 and workload.adapter is None:
        return shared + held(shape, workload)
    return shared


def offloaded(shape: Shape, workload: Workload) -> Components:
    """Bytes that the processes of a machine have offloaded to CPU, each its own shards."""
    sharding, (count, _) = workload.sharding, trained(shape, workload)
    parts: Components = {}
    if sharding.offload_weights and not workload.quantized:
        parts["offloaded weights"] = locked_weights(shape, workload, held(shape, workload) / shape.parameters())
        if workload.reference:
            parts["offloaded reference"] = locked_weights(shape, workload, workload.weight_bytes)
    if sharding.offload_optimizer or workload.optimizer.startswith("paged_"):
        parts["offloaded optimizer"] = optimizer_state(shape, workload) / sharding.optimizer_shards
    if sharding.offload_optimizer and sharding.library == "deepspeed" and workload.adapter is None:
        parts["offloaded master weights"] = count * 4 / sharding.optimizer_shards
    if sharding.offload_optimizer or workload.gradients_on_host:
        parts["offloaded gradients"] = offloaded_gradients(shape, workload)
    if workload.activations_on_host and workload.device == "cuda":
        pieces = ceil(workload.microbatch * workload.compute_bytes * shape.hidden_size / PINNED_PIECE)
        parts["offloaded activations"] = shape.num_hidden_layers * pieces * PINNED_PIECE
    return {name: workload.processes * size for name, size in parts.items()}


def offloaded_gradients(shape: Shape, workload: Workload) -> float:
    """Bytes of the gradients that a process has offloaded; DeepSpeed keeps them in both types, in a tensor per type."""
    sharding, (count, size) = workload.sharding, trained(shape, workload)
    if sharding.library == "deepspeed":
        return sum(locked(number * count / sharding.gradient_shards) for number in (workload.compute_bytes, 4))
    if sharding.library == "fsdp" and workload.adapter is None:
        return locked_weights(shape, workload, size)
    return count * size / sharding.gradient_shards


def locked_weights(shape: Shape, workload: Workload, number_bytes: float) -> float:
    """Bytes that a process page-locks for its shards: a tensor per weight (FSDP2), or a single tensor (DeepSpeed)."""
    shards = workload.sharding.weight_shards
    if workload.sharding.library == "deepspeed":
        return locked(number_bytes * shape.parameters() / shards)
    tensors: list[tuple[float, int]] = [(inputs * outputs, many) for inputs, outputs, many in shape.all_linears()]
    tensors += [(shape.embeddings, 1 if shape.tie_word_embeddings else 2), (shape.experts / 2, 2 * shape.mixtures)]
    return sum(many * locked(number_bytes * numbers / shards) for numbers, many in tensors)


def locked(size: float) -> float:
    """Bytes that PyTorch page-locks for a tensor: the next power of two (`CachingHostAllocator.h`)."""
    return 2.0 ** ceil(log2(size)) if size else 0.0
