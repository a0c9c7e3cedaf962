"""Memory of a run by phase and component: arithmetic on the architecture's numbers, no torch.

Functions return bytes unless stated otherwise. The lifetimes of tensors follow from the libraries' source and from the
tensors that autograd saves; `benchmarks/simulation.py` compares the sum with PyTorch's `MemTracker`, which uses no
formula.
"""

from dataclasses import replace

from grpo.planning import images
from grpo.planning.activations import (
    head_backward,
    head_forward,
    layer_backward,
    layer_forward,
    layer_kept,
    masks,
    recurrent_backward,
)
from grpo.planning.adapters import adapted_experts
from grpo.planning.families import PARALLEL
from grpo.planning.persistent import (
    Components,
    dequantized,
    layer_parameters,
    persistent,
    trained,
    unsharded,
)
from grpo.planning.shape import Shape
from grpo.planning.workload import Workload
from grpo.utils.limits import GB

TRANSFER = 3.0 * GB
"""Bytes of a transfer of weights to a vLLM server: two buffers of 1 GiB, and merged copies in the queue."""
CPU_FRAGMENTS = 0.4
"""Fragments of malloc, a fraction of the temporary memory: updates on CPUs took 1.1 to 1.6 times of it."""


def kv_cache(shape: Shape, workload: Workload) -> float:
    """Bytes of keys and values of all sequences at full length, and of states.

    A layer with a sliding window keeps only the window.
    """
    length, size = workload.sequence, workload.compute_bytes
    sliding, full = shape.caching_layers
    numbers = full * length * (shape.latent.cached if shape.latent else 2 * shape.global_kv_width)
    numbers += 2 * sliding * min(length, shape.sliding_window or length) * shape.sliding_kv_width
    states = shape.recurrent.cache(size) if shape.recurrent else 0
    return workload.sequences * (numbers * size + states)


def rollout(shape: Shape, workload: Workload) -> Components:
    """Memory during generation: vLLM's fraction, or the policy's memory in the larger of two moments.

    In the first moment the distinct prompts pass through a layer, or their images through the tower. The second moment
    is the last token of completions at full length: temperature, softmax and sampling copy the logits in float32, and a
    layer's keys and values are repeated per query head, because a mask is given (not since transformers 5.24); on a
    CPU, or of a completion alone, only its keys are copied, where they need more room. A CPU has the prompts once in
    the cache.
    """
    parts = persistent(shape, workload) | images.held_images(shape.vision, workload, "rollout")
    if workload.sharding.gathers_to_generate:
        parts["unsharded weights"] = workload.compute_bytes * shape.parameters()
    if workload.vllm_fraction:
        return parts | {"vllm": workload.vllm_fraction * workload.gpu_memory}
    if workload.on_server:
        return parts if workload.sends_adapter else parts | {"transfer": TRANSFER}
    logits = workload.sequences * shape.vocab_size * (workload.compute_bytes + 12 + 16 * workload.sampling_filter)
    tokens = workload.prompts_at_once * workload.prompt
    masked = workload.prompt if workload.prompts_at_once > 1 else 0
    prefill = layer_forward(shape, workload, tokens, masked) + tokens * masked
    read = replace(workload, sequences=workload.prompts_at_once, completion=0)
    reading = {
        "kv cache": kv_cache(shape, read),
        "activations": max(prefill, images.without_gradient(shape.vision, workload, "rollout")),
        "logits": workload.prompts_at_once * shape.vocab_size * workload.compute_bytes,
    }
    full = not shape.num_sliding_layers and shape.recurrent is None
    shared = workload.shares_keys and workload.device == "cpu" and full
    growing = kv_cache(shape, replace(workload, prompt=0) if shared else workload)
    copied: float = workload.sequences * workload.sequence * 2 * shape.query_width * workload.compute_bytes
    if workload.device == "cpu" or workload.sequences == 1:  # alone, it has no padding, and so no mask
        copied = growing / max(1, sum(shape.caching_layers)) / 2
    if shape.latent:  # keys and values of all tokens, computed again from their latents
        copied = workload.sequences * workload.sequence * shape.latent.read * workload.compute_bytes
    cache = growing + (kv_cache(shape, read) if shared else 0.0)
    records = workload.device == "cuda" and workload.sharding.weight_shards == 1
    if records and shape.recurrent:  # a recorded step is compared with Python's, from equal states
        cache += workload.sequences * shape.recurrent.cache(workload.compute_bytes)
    last = {"kv cache": cache, "activations": copied, "logits": logits}
    larger = reading if sum(reading.values()) > sum(last.values()) else last
    return parts | larger | {"dequantized": dequantized(shape, workload)}


def logprobs(shape: Shape, workload: Workload) -> Components:
    """Memory during scoring without a gradient: a layer of a micro-batch, then the head.

    Under FSDP2 TRL wraps a reference as a single group, which is unsharded completely (`prepare_fsdp`).
    """
    sharding = replace(workload.sharding, stage=2) if workload.sharding.library == "fsdp" else workload.sharding
    size, hidden = workload.compute_bytes, shape.hidden_size
    text = max(max(layer_forward(shape, workload, *one), one[0] * size * 2 * hidden) for one in passes(shape, workload))
    parts = persistent(shape, workload) | images.held_images(shape.vision, workload, "logprobs")
    return parts | {
        "activations": max(text, images.without_gradient(shape.vision, workload, "logprobs")),
        "head": head_forward(shape, workload, workload.scored(workload.microbatch)),
        "unsharded reference": unsharded(shape, replace(workload, sharding=sharding)) if workload.reference else 0.0,
        "dequantized": dequantized(shape, workload),
    }


def scoring(shape: Shape, workload: Workload) -> Components:
    """Memory while reward models score a micro-batch without a gradient, layer by layer; the largest model counts."""
    activations = [0.0]
    for model, size in workload.reward_models:
        of_model = replace(workload, compute_bytes=size, weight_bytes=size, adapter=None)
        for tokens, masked in passes(model, of_model):
            activations.append(layer_forward(model, of_model, tokens, masked) + tokens * 2 * size * model.hidden_size)
    parts = persistent(shape, workload) | images.held_images(shape.vision, workload, "rollout")
    return parts | {"activations": max(activations)}


def passes(shape: Shape, workload: Workload) -> list[tuple[int, int]]:
    """Return tokens and length of masked sequences of the largest micro-batches: of several sequences, and of one.

    A sequence alone has no padding, and transformers leaves its mask to the kernel, except in layers with a window.
    """
    window = shape.sliding_window if shape.num_sliding_layers and workload.masks else 0
    alone = workload.sequence if window and workload.sequence >= window else 0
    return [(workload.tokens, workload.masked), (workload.sequence, alone)]


def update(shape: Shape, workload: Workload) -> Components:
    """Memory of the update: the largest of backward passes and the optimizer's step."""
    moments = [optimizer_step(shape, workload)]
    for tokens, masked in passes(shape, workload):
        head = head_backward(shape, workload, workload.scored(tokens))
        attention, by_state = (layer_kept(shape, workload, tokens, masked, kind) for kind in (False, True))
        moments.append(backward(shape, workload, tokens, masked, head, attention, by_state))
    return max(moments, key=lambda parts: sum(parts.values()))


def backward(
    shape: Shape, workload: Workload, tokens: int, masked: int, head: float, kept: float, kept_by_state: float = 0.0
) -> Components:
    """Memory of a micro-batch's backward pass.

    It holds the gradients of earlier micro-batches and the activations of all layers, and peaks in the head with the
    final norm, or in the last layer. With checkpointing (1604.06174) a layer keeps only its input, and layers are
    recomputed one at a time, after the head; of offloaded inputs two are on the device. The vision tower is first in
    the forward pass and last in the backward pass.

    Args:
        shape: of the policy.
        workload: of the run.
        tokens: of the micro-batch.
        masked: length of its sequences if they have masks, otherwise 0.
        head: bytes that the head's backward pass takes.
        kept: bytes that autograd keeps of a layer with attention.
        kept_by_state: bytes that it keeps of a layer with a state.
    """
    size, hidden = workload.compute_bytes, shape.hidden_size
    inputs = float(tokens * size * hidden * inputs_on_device(shape, workload))
    final: float = tokens * (4 + (2 if workload.adapter else 3) * size) * hidden  # norm and head
    kinds = [(shape.attention_layers, kept, layer_backward(shape, workload, tokens))]
    if shape.recurrent and shape.model_type in PARALLEL:
        kinds = [(shape.num_hidden_layers, kept, recurrent_backward(shape, workload, tokens))]
    elif shape.recurrent:
        kinds.append((shape.recurrent.layers, kept_by_state, recurrent_backward(shape, workload, tokens)))
    layer = max(work + (of * workload.checkpointing) for _, of, work in kinds) + unsharded_gradients(shape, workload)
    layer += tokens * size * hidden  # the gradient of its output
    if shape.per_layer:
        layer += tokens * shape.per_layer.gradients(size)
    if shape.altup:
        inputs *= shape.altup.streams
        final += tokens * shape.altup.outside(size, hidden)
        layer += tokens * shape.altup.gradients(size, hidden)
    experts = adapted_experts(shape, workload)
    activations = inputs if workload.checkpointing else sum(count * of for count, of, _ in kinds)
    activations += tokens * masks(shape, masked)
    if shape.per_layer and workload.checkpointing:
        held = shape.per_layer.held(size, workload.adapter is not None)
        activations += tokens * held * shape.num_hidden_layers
    activations += experts * (1 if workload.checkpointing else shape.mixtures)
    work = max(head + final, layer)  # the layers begin when the head and its norm are through
    # autocast keeps its copies to the end of the pass
    if workload.weight_bytes > workload.compute_bytes and not workload.quantized:
        activations += size * sum(i * o * n for i, o, n in shape.all_linears())
    tower, tower_work = images.in_update(shape.vision, workload)
    if tower_work > activations + work:
        activations, work = 0.0, tower_work
    parts = in_update(shape, workload) | {
        "vision activations": tower,
        "activations": activations,
        "backward": work,
        "dequantized": dequantized(shape, workload),
    }
    if workload.device == "cpu":
        parts["fragments"] = CPU_FRAGMENTS * (activations + tower + work)
    return parts


def inputs_on_device(shape: Shape, workload: Workload) -> int:
    """Layers whose inputs are on the device at once: a CPU's own memory is where offloaded inputs go."""
    return 2 if workload.activations_on_host and workload.device == "cuda" else shape.num_hidden_layers


def optimizer_step(shape: Shape, workload: Workload) -> Components:
    """Memory of the optimizer's step: `foreach` of PyTorch holds the square roots of all second moments at once."""
    sharding, (count, size) = workload.sharding, trained(shape, workload)
    at_once = workload.optimizer == "adamw_torch" and workload.device == "cuda" and not workload.gradients_on_host
    step = count * size / sharding.optimizer_shards if at_once else 0.0
    if sharding.library == "deepspeed" and sharding.float32 and not sharding.offload_optimizer:
        step += count * 4 / sharding.optimizer_shards  # the gradients in float32
    return in_update(shape, workload) | {"optimizer step": step}


def in_update(shape: Shape, workload: Workload) -> Components:
    """Memory that the whole update takes."""
    held_images = images.held_images(shape.vision, workload, "update")
    return persistent(shape, workload) | held_images | {"gradients": gradients(shape, workload)}


def gradients(shape: Shape, workload: Workload) -> float:
    """Bytes of the gradients of earlier micro-batches.

    FSDP2 keeps them in float32, DeepSpeed in the type of the computation (`gradient_accumulation_dtype`).
    """
    sharding, (count, size) = workload.sharding, trained(shape, workload)
    if sharding.offload_optimizer:
        return 0.0
    if workload.gradients_on_host:  # of one matrix, and the copy it is added to
        return 0.0 if workload.adapter else 2.0 * size * shape.hidden_size * shape.intermediate_size
    return count * (workload.compute_bytes if sharding.library == "deepspeed" else size) / sharding.gradient_shards


def unsharded_gradients(shape: Shape, workload: Workload) -> float:
    """Bytes of the gradients of two layers that FSDP2 has whole on their way to the shards."""
    layer = trained(shape, workload)[0] / shape.num_hidden_layers if workload.adapter else layer_parameters(shape)
    return 2 * layer * workload.compute_bytes if workload.sharding.library == "fsdp" else 0.0


def phases(shape: Shape, workload: Workload) -> dict[str, Components]:
    """Return bytes on the device by phase and component; components of 0 bytes are omitted."""
    loading = {name: size for name, size in persistent(shape, workload).items() if name != "optimizer"}
    if workload.quantized:  # each tensor is loaded first and then quantized
        loading["loading"] = workload.weight_bytes * shape.hidden_size * shape.intermediate_size
    if workload.vllm_fraction:
        loading["vllm"] = workload.vllm_fraction * workload.gpu_memory
    by_phase = {
        "load": loading,
        "rollout": rollout(shape, workload),
        **({"reward": scoring(shape, workload)} if workload.reward_models else {}),
        "logprobs": logprobs(shape, workload),
        "update": update(shape, workload),
    }
    return {phase: {name: size for name, size in parts.items() if size} for phase, parts in by_phase.items()}


def peak(shape: Shape, workload: Workload, *names: str) -> float:
    """Return the bytes of the largest phase, or of the largest of the phases in `names`."""
    return max(sum(parts.values()) for phase, parts in phases(shape, workload).items() if not names or phase in names)
