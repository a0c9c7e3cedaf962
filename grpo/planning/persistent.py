"""Memory that a run keeps from step to step, by component; bytes unless stated otherwise. Arithmetic, no torch."""

from dataclasses import replace

from grpo.planning.adapters import adapter_parameters
from grpo.planning.shape import Shape
from grpo.planning.workload import Workload
from grpo.utils.limits import CONTEXT, GB

HOST = {"cuda": 2.5 * GB, "mps": 0.55 * GB, "cpu": 0.55 * GB}
"""Host memory of a Python process with the libraries loaded, bytes."""
STATES = {"lion": 1, "sgd": 0, "rmsprop": 1, "adagrad": 1, "ademamix": 3, "adafactor": 0.01, "lomo": 0, "adalomo": 0}
"""Numbers that an optimizer keeps per parameter; Adam, and any other, two."""
BLOCK = 256
"""Numbers per scale in an 8-bit optimizer state of bitsandbytes."""
SLEEPING = 0.3 * GB
"""Memory that a sleeping vLLM engine keeps, bytes: CUDA graphs and communication buffers."""


Components = dict[str, float]


def weights(shape: Shape, workload: Workload) -> float:
    """Bytes of the model's weights.

    NF4: half a byte per weight, and per 64 weights a scale of 4 bytes, or with double quantization one of 1 byte and
    4 bytes per 256 scales (2305.14314, section 3).
    """
    if not workload.quantized:
        return shape.parameters() * workload.weight_bytes
    packed = sum(inputs * outputs * count for inputs, outputs, count in shape.all_linears())
    scale = (1 + 4 / 256) / 64 if workload.double_quantized else 4 / 64
    packed_bytes = 0.5 + scale if workload.quantized == 4 else 1.0
    return packed * packed_bytes + (shape.parameters() - packed) * workload.weight_bytes


def dequantized(shape: Shape, workload: Workload) -> float:
    """Bytes of the largest linear weight, dequantized while it is multiplied with; 0 without quantization."""
    largest = max(inputs * outputs for inputs, outputs, _ in shape.all_linears())
    return workload.compute_bytes * largest if workload.quantized else 0.0


def trained(shape: Shape, workload: Workload) -> tuple[float, float]:
    """Number of trained parameters, and bytes per number in them and in their gradients."""
    if workload.adapter:
        return adapter_parameters(shape, workload.adapter), workload.adapter.size
    frozen = shape.audio_parameters + (shape.vision.parameters_of(*workload.freeze) if shape.vision else 0)
    return shape.parameters() - frozen, 4 if workload.sharding.float32 else workload.weight_bytes


def optimizer_state(shape: Shape, workload: Workload) -> float:
    """Bytes of the optimizer's state.

    PyTorch's optimizers keep numbers of the parameter's type. The optimizers of bitsandbytes keep float32, or in 8 bits
    1 byte per number and a scale of 4 bytes per 256; transformers configures float32 for embeddings.
    """
    count, size = trained(shape, workload)
    name = workload.optimizer.removeprefix("paged_")
    states = next((number for known, number in STATES.items() if name.startswith(known)), 2)
    if "8bit" in name:
        embeddings = shape.embeddings + (shape.per_layer.embeddings if shape.per_layer else 0)
        embeddings = 0 if workload.adapter else embeddings
        return states * ((count - embeddings) * (1 + 4 / BLOCK) + embeddings * 4)
    if "32bit" in name or "bnb" in name or name.startswith("ademamix") or name != workload.optimizer:
        size = 4
    return count * states * size


def held(shape: Shape, workload: Workload) -> float:
    """Bytes of the policy's weights over all processes that divide them.

    FSDP2 divides trained weights in float32, because accelerate casts them (`fsdp2_prepare_model`), and frozen weights
    in their own type.
    """
    if workload.sharding.library == "fsdp" and workload.sharding.float32 and workload.adapter is None:
        count, size = trained(shape, workload)
        return size * count + workload.weight_bytes * (shape.parameters() - count)
    return weights(shape, workload)


def unsharded(shape: Shape, workload: Workload) -> float:
    """Bytes of the weights that a device has whole for a while, in the type of the computation.

    FSDP2: the head, which stays from the forward to the backward pass, and the input embedding or two layers, of which
    the second is on its way; all weights with `reshard_after_forward=false`. ZeRO-3: as many as may stay between two
    uses. Quantized weights are not divided.
    """
    sharding, parameters = workload.sharding, shape.parameters()
    if workload.quantized or not (sharding.library == "fsdp" or sharding.stage == 3):
        return 0.0
    count: float = min(parameters, sharding.live_parameters)
    if sharding.library == "fsdp":
        embedding = 0 if shape.tie_word_embeddings else shape.embeddings
        layer = layer_parameters(shape)
        root = shape.embeddings + (shape.vision.projector_parameters() if shape.vision else 0)
        count = parameters if sharding.stage == 2 else min(parameters, root + max(embedding, 2 * layer))
    return workload.compute_bytes * count


def layer_parameters(shape: Shape) -> float:
    """Return the mean number of parameters per layer of the language model."""
    embeddings = shape.embeddings * (1 if shape.tie_word_embeddings else 2)
    embeddings += shape.per_layer.embeddings if shape.per_layer else 0
    others = shape.vision_parameters + shape.audio_parameters + embeddings
    return (shape.parameters() - others) / shape.num_hidden_layers


def buckets(shape: Shape, workload: Workload) -> float:
    """Bytes of the buffers in which gradients are averaged: DDP's hold all of them, DeepSpeed's a fixed number."""
    count, size = trained(shape, workload)
    if workload.sharding.library == "deepspeed":
        bucket = workload.sharding.bucket
        return workload.compute_bytes * (shape.hidden_size**2 if bucket is None else bucket)
    return count * size if workload.sharding.processes > 1 and not workload.sharding.library else 0.0


def reward_models(workload: Workload) -> float:
    """Bytes of the weights of all reward models, which have no output embedding."""
    return sum(
        size * (shape.parameters() - (0 if shape.tie_word_embeddings else shape.embeddings))
        for shape, size in workload.reward_models
    )


def persistent(shape: Shape, workload: Workload) -> Components:
    """Memory that every phase takes, from the end of the first step on."""
    sharding, (count, size) = workload.sharding, trained(shape, workload)
    shards = 1 if workload.quantized else sharding.weight_shards
    copied = sharding.library == "deepspeed" and sharding.float32 and workload.adapter is None
    here = 0 if sharding.offload_weights and not workload.quantized else 1
    weight_copies = 0 if workload.shares_weights else here
    text = replace(shape, vision=None, given_parameters=shape.parameters() - shape.vision_parameters)
    language = weight_copies * held(text, workload) / shards
    parts = {
        "context": CONTEXT if workload.device != "cpu" else 0.0,
        "process": HOST["cpu"] if workload.device == "cpu" else 0.0,
        "weights": language,
        "vision weights": weight_copies * held(shape, workload) / shards - language,
        "master weights": count * 4 / sharding.optimizer_shards if copied and not sharding.offload_optimizer else 0.0,
        "adapter": here * count * size / sharding.weight_shards if workload.adapter else 0.0,
        "reference": here * weights(shape, workload) / shards if workload.reference else 0.0,
        "reward models": reward_models(workload),
        "unsharded weights": unsharded(shape, workload),
        "buckets": buckets(shape, workload),
    }
    if not (sharding.offload_optimizer or workload.optimizer.startswith("paged_")):
        parts["optimizer"] = optimizer_state(shape, workload) / sharding.optimizer_shards
    if workload.vllm_fraction:
        parts["vllm"] = SLEEPING if workload.vllm_sleeps else workload.vllm_fraction * workload.gpu_memory
    return parts
