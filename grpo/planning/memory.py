"""Memory of a run by phase and component: arithmetic on the architecture's numbers, no torch.

Functions return bytes unless they say otherwise. Which tensors live when follows from the libraries' source and from
what autograd saves; `benchmarks/simulation.py` compares the sum with PyTorch's `MemTracker`, which knows no formula.
"""

from grpo.limits import CONTEXT, GB
from grpo.planning.shape import QK_NORM, SANDWICH, Shape
from grpo.planning.workload import Adapter, Workload

HOST = {"cuda": 2.5 * GB, "cpu": 0.55 * GB}
"""Host memory of a Python process with the libraries loaded, bytes."""
STATES = {
    "adamw": 2,
    "adam": 2,
    "lion": 1,
    "sgd": 0,
    "rmsprop": 1,
    "adagrad": 1,
    "ademamix": 3,
    "adafactor": 0.01,
    "lomo": 0,
    "adalomo": 0,
}
"""Numbers that an optimizer keeps per parameter."""
BLOCK = 256
"""Numbers per scale in an 8-bit optimizer state of bitsandbytes."""
TRANSFER = 3.0 * GB
"""Weights on their way to a vLLM server, bytes: two buffers of 1 GiB, and merged copies that wait for one."""
SLEEPING = 0.3 * GB
"""Memory that a sleeping vLLM engine keeps, bytes: CUDA graphs and communication buffers."""
CPU_FRAGMENTS = 0.4
"""Fragments of malloc, a fraction of the temporary memory: benchmarks/update_cpu.json shows 1.1 to 1.6 times it."""

Components = dict[str, float]


def weights(shape: Shape, workload: Workload) -> float:
    """Bytes of the model's weights.

    NF4: half a byte per weight, and per 64 weights a scale of 4 bytes, or with double quantization one of 1 byte and
    4 bytes per 256 scales (2305.14314, section 3).
    """
    if not workload.quantized:
        return shape.parameters() * workload.weight_bytes
    packed = sum(inputs * outputs * count for inputs, outputs, count in shape.linears().values())
    scale = (1 + 4 / 256) / 64 if workload.double_quantized else 4 / 64
    packed_bytes = 0.5 + scale if workload.quantized == 4 else 1.0
    return packed * packed_bytes + (shape.parameters() - packed) * workload.weight_bytes


def adapter_parameters(shape: Shape, adapter: Adapter) -> int:
    """Number of LoRA parameters: rank x (inputs + outputs) per module (2106.09685, section 4).

    With `all-linear` PEFT also adapts the router of a mixture and each expert, whose fused gate and up projection get
    twice the rank (peft/utils/transformers_weight_conversion.py).
    """
    dense = sum(
        adapter.rank * (inputs + outputs) * count
        for name, (inputs, outputs, count) in shape.linears().items()
        if adapter.modules is None or name in adapter.modules
    )
    hidden, width, experts = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    mixture = hidden + experts + experts * (2 * (hidden + 2 * width) + width + hidden)
    return dense + (adapter.rank * mixture * shape.mixtures if adapts_experts(shape, adapter) else 0)


def adapts_experts(shape: Shape, adapter: Adapter | None) -> bool:
    """Whether an adapter changes the experts of a mixture; PEFT adapts them in every family that it knows but one."""
    return bool(shape.mixtures and adapter and adapter.modules is None and shape.model_type != "qwen2_moe")


def adapted_experts(shape: Shape, workload: Workload) -> float:
    """Bytes of a layer's expert weights with their adapters added, which PEFT keeps for the backward pass."""
    return float(workload.compute_bytes * shape.experts) if adapts_experts(shape, workload.adapter) else 0.0


def dequantized(shape: Shape, workload: Workload) -> float:
    """Bytes of the largest linear weight, dequantized while it is multiplied with; 0 without quantization."""
    largest = max(inputs * outputs for inputs, outputs, _ in shape.linears().values())
    return workload.compute_bytes * largest if workload.quantized else 0.0


def trained(shape: Shape, workload: Workload) -> tuple[float, float]:
    """Number of trained parameters, and bytes per number in them and in their gradients."""
    if workload.adapter:
        return adapter_parameters(shape, workload.adapter), workload.adapter.number_bytes
    return shape.parameters(), 4 if workload.float32_training else workload.weight_bytes


def optimizer_state(shape: Shape, workload: Workload) -> float:
    """Bytes of the optimizer's state.

    PyTorch's optimizers keep numbers of the parameter's type. Those of bitsandbytes keep float32, or in 8 bits 1 byte
    per number and a scale of 4 bytes per 256; transformers has them keep float32 for embeddings.
    """
    count, size = trained(shape, workload)
    name = workload.optimizer.removeprefix("paged_")
    states = next((number for known, number in STATES.items() if name.startswith(known)), 2)
    if "8bit" in name:
        embeddings = 0 if workload.adapter else shape.embeddings
        return states * ((count - embeddings) * (1 + 4 / BLOCK) + embeddings * 4)
    if "32bit" in name or "bnb" in name or name.startswith("ademamix") or name != workload.optimizer:
        size = 4
    return count * states * size


def kv_cache(shape: Shape, workload: Workload) -> float:
    """Bytes of keys and values of all sequences at full length; a layer with a sliding window keeps only the window."""
    length = workload.sequence
    seen = length * (shape.num_hidden_layers - shape.num_sliding_layers)
    seen += min(length, shape.sliding_window or length) * shape.num_sliding_layers
    return workload.sequences * seen * 2 * shape.kv_width * workload.compute_bytes


def persistent(shape: Shape, workload: Workload) -> Components:
    """Memory that every phase takes, from the end of the first step on."""
    base = weights(shape, workload)
    count, size = trained(shape, workload)
    copied = (
        workload.float32_training
        and workload.adapter is None
        and workload.weight_bytes < 4
        and not workload.offload_optimizer
    )
    parts = {
        "master weights": count * 4 / workload.optimizer_shards if copied else 0.0,
        "context": CONTEXT if workload.device == "cuda" else 0.0,
        "process": HOST["cpu"] if workload.device == "cpu" else 0.0,
        "weights": 0.0 if workload.offload_weights else base / workload.weight_shards,
        "adapter": count * size / workload.weight_shards if workload.adapter else 0.0,
        "reference": base / workload.weight_shards if workload.reference and not workload.offload_weights else 0.0,
    }
    if workload.weight_shards > 1 or workload.offload_weights:  # those of the layer at work and the next
        parts["unsharded layers"] = 2 * base / shape.num_hidden_layers
    if not (workload.offload_optimizer or workload.optimizer.startswith("paged_")):
        parts["optimizer"] = optimizer_state(shape, workload) / workload.optimizer_shards
    if workload.vllm_share:
        parts["vllm"] = SLEEPING if workload.vllm_sleeps else workload.vllm_share * workload.gpu_memory
    return parts


def rollout(shape: Shape, workload: Workload) -> Components:
    """Memory while completions are generated: by vLLM in its share, else by the policy in the larger of two moments.

    The first is the prompts' pass through a layer. The second is the last token: the logits are copied in float32 for
    temperature, softmax and sampling, and a layer's keys and values are repeated per query head, as a mask needs.
    """
    parts = persistent(shape, workload)
    if workload.vllm_share:
        return parts | {"vllm": workload.vllm_share * workload.gpu_memory}
    if workload.on_server:
        return parts | {"transfer": TRANSFER}
    logits = workload.sequences * shape.vocab_size * (workload.compute_bytes + 12 + 16 * workload.sampling_filter)
    repeated = workload.sequences * workload.sequence * 2 * shape.query_width * workload.compute_bytes
    mask = workload.prompt * (1 + workload.compute_bytes)
    prefill = workload.sequences * workload.prompt * (layer_forward(shape, workload) + mask)
    return parts | {
        "kv cache": kv_cache(shape, workload),
        "activations": max(prefill, repeated),
        "logits": logits,
        "dequantized": dequantized(shape, workload),
    }


def logprobs(shape: Shape, workload: Workload) -> Components:
    """Memory while completions are scored without a gradient: one layer of a micro-batch, then the head."""
    layer = layer_forward(shape, workload) + workload.shared_sequence * workload.compute_bytes
    return persistent(shape, workload) | {
        "activations": workload.microbatch * max(layer, workload.compute_bytes * 2 * shape.hidden_size),
        "head": head_forward(shape, workload, workload.scored),
        "dequantized": dequantized(shape, workload),
    }


def update(shape: Shape, workload: Workload) -> Components:
    """Memory of the update: the larger of a micro-batch's backward pass and the optimizer's step.

    The backward pass holds the gradients of earlier micro-batches. It peaks in the head, when the activations of all
    layers are kept, or in the last layer. With checkpointing (1604.06174) a layer keeps only its input, and one layer
    at a time is recomputed; none is yet while the head is at work.
    """
    tokens = workload.microbatch
    count, size = trained(shape, workload)
    kept = tokens * layer_activations(shape, workload)
    inputs = tokens * workload.compute_bytes * shape.hidden_size * shape.num_hidden_layers
    final = tokens * (4 + (2 if workload.adapter else 3) * workload.compute_bytes) * shape.hidden_size  # norm and head
    head = head_backward(shape, workload, workload.scored)
    layer = tokens * layer_backward(shape, workload)
    experts = adapted_experts(shape, workload)
    activations = final + (float(inputs) if workload.checkpointing else kept * shape.num_hidden_layers)
    activations += experts * (1 if workload.checkpointing else shape.mixtures)
    work = max(head, kept + layer if workload.checkpointing else layer)
    gradients = count * size / workload.gradient_shards
    if workload.gradients_on_host or workload.offload_optimizer:  # of one matrix, and the copy it is added to
        gradients = 0.0 if workload.adapter else 2.0 * size * shape.hidden_size * shape.intermediate_size
    if (
        workload.weight_bytes > workload.compute_bytes and not workload.quantized
    ):  # autocast keeps its copies to the end of the pass
        activations += workload.compute_bytes * sum(i * o * n for i, o, n in shape.linears().values())
    stays = persistent(shape, workload) | {"gradients": gradients}
    backward = stays | {"activations": activations, "backward": work, "dequantized": dequantized(shape, workload)}
    if workload.device == "cpu":
        backward["fragments"] = CPU_FRAGMENTS * (activations + work)
    # `foreach` of PyTorch holds the square roots of all second moments at once
    at_once = workload.optimizer == "adamw_torch" and workload.device == "cuda" and not workload.gradients_on_host
    roots = count * size / workload.optimizer_shards if at_once else 0.0
    return max(backward, stays | {"optimizer step": roots}, key=lambda parts: sum(parts.values()))


def phases(shape: Shape, workload: Workload) -> dict[str, Components]:
    """Return bytes on the device by phase and component; components of 0 bytes are omitted."""
    loading = {name: size for name, size in persistent(shape, workload).items() if name != "optimizer"}
    if workload.quantized:  # each tensor is loaded first and then quantized
        loading["loading"] = workload.weight_bytes * shape.hidden_size * shape.intermediate_size
    if workload.vllm_share:
        loading["vllm"] = workload.vllm_share * workload.gpu_memory
    found = {
        "load": loading,
        "rollout": rollout(shape, workload),
        "logprobs": logprobs(shape, workload),
        "update": update(shape, workload),
    }
    return {phase: {name: size for name, size in parts.items() if size} for phase, parts in found.items()}


def peak(shape: Shape, workload: Workload, *names: str) -> float:
    """Return the bytes of the largest phase, or of the largest of the phases in `names`."""
    return max(sum(parts.values()) for phase, parts in phases(shape, workload).items() if not names or phase in names)


def host(shape: Shape, workload: Workload) -> Components:
    """Return bytes of host memory by component, summed over the processes of this machine.

    Memory of the devices is not included, also where it is the host's. Several processes without sharding each read
    the weights into host memory before they move them (TRL's `device_map=None`).
    """
    count, size = trained(shape, workload)
    parts = {"processes": HOST[workload.device] * workload.processes}
    if workload.device == "cuda" and workload.processes > 1:
        parts["loading"] = weights(shape, workload) * (1 if workload.weight_shards > 1 else workload.processes)
    if workload.offload_weights:
        parts["offloaded weights"] = weights(shape, workload) * (2 if workload.reference else 1)
    if workload.offload_optimizer or workload.optimizer.startswith("paged_"):
        parts["offloaded optimizer"] = optimizer_state(shape, workload)
    if workload.offload_optimizer and workload.float32_training and workload.adapter is None:
        parts["offloaded master weights"] = count * 4.0
    if workload.gradients_on_host or workload.offload_optimizer:
        parts["offloaded gradients"] = count * size
    return {name: size for name, size in parts.items() if size}


HEAD_TILE = (4096, 32768)
"""Tokens and vocabulary entries that TRL's head computes at once (trl/kernels/chunked_logprob.py)."""


def layer_activations(shape: Shape, workload: Workload) -> float:
    """Bytes per token that autograd keeps of one layer.

    Two RMS norms keep their input in float32, and the normalized input where their own weight is trained; linear
    modules keep their input where their weight is trained, and LoRA a copy per module; attention keeps queries, keys
    and values (repeated per query head, as a mask needs), its output, its log-sum-exp and the mask; SwiGLU keeps the
    gate, its activation, the other half and their product. Softmax over the sequence is not kept (FlashAttention,
    2205.14135).
    """
    hidden, query, kv, width = shape.hidden_size, shape.query_width, shape.kv_width, shape.active_width
    size = workload.compute_bytes
    norms = 2 * 4 * hidden
    if shape.model_type in SANDWICH:  # a norm before and one after each half, normalized in float32
        norms = 4 * (4 if workload.adapter else 8 - size) * hidden
    if shape.model_type in QK_NORM:
        norms += (4 if workload.adapter else 4 + size) * (query + kv)
    attention = size * 4 * query + 4 * shape.num_attention_heads + size * workload.shared_sequence
    feed_forward = size * 3 * width
    if workload.adapter is None:
        norms += (4 if shape.model_type in SANDWICH else 2) * size * hidden
        inputs = 2 * hidden + width
        if workload.weight_bytes != size:  # autocast makes a copy per module
            inputs = 3 * hidden + query + 2 * hidden + width
            norms += 2 * (4 - size) * hidden
    else:
        named = [
            (inputs, outputs)
            for name, (inputs, outputs, _) in shape.linears().items()
            if workload.adapter.modules is None or name in workload.adapter.modules
        ]
        inputs = sum(inputs for inputs, _ in named) + len(named) * workload.adapter.rank
    mixture = 4 * shape.num_experts + size * 4 * hidden * shape.num_experts_per_tok if shape.num_experts else 0
    return norms + attention + feed_forward + size * inputs + mixture


def layer_backward(shape: Shape, workload: Workload) -> float:
    """Bytes per token that the backward pass of one layer takes for a while: gradients of the feed-forward layer."""
    wide = workload.compute_bytes * (4 if workload.adapter else 3)
    return wide * shape.active_width + (4 + 2 * workload.compute_bytes) * shape.hidden_size


def layer_forward(shape: Shape, workload: Workload) -> float:
    """Bytes per token that a layer takes for a while without gradient: input, float32 in the norm, SwiGLU's halves."""
    size = workload.compute_bytes
    attention = size * (2 * shape.hidden_size + 4 * shape.query_width) + 4 * shape.hidden_size
    return max(attention, size * (2 * shape.hidden_size + 3 * shape.active_width))


def head_backward(shape: Shape, workload: Workload, scored: int) -> float:
    """Bytes that the head's backward pass takes: a tile of logits, and float32 sums of the gradients."""
    total = head_tile(shape, workload, scored, copies=6) + scored * shape.hidden_size * (4 + workload.compute_bytes)
    if workload.adapter is None:
        total += shape.embeddings * (4 + workload.weight_bytes)
    return total


def head_forward(shape: Shape, workload: Workload, scored: int) -> float:
    """Bytes that the head takes to score `scored` tokens."""
    return head_tile(shape, workload, scored, copies=4) + scored * shape.hidden_size * workload.compute_bytes


def head_tile(shape: Shape, workload: Workload, scored: int, copies: int) -> float:
    """Bytes of the logits that are computed at once.

    On a CPU, without Triton, float32 copies of them are made, and only the part that a small vocabulary fills is used.
    """
    tokens, entries = min(scored, HEAD_TILE[0]), HEAD_TILE[1]
    if workload.device == "cpu":
        return tokens * min(shape.vocab_size, entries) * (workload.compute_bytes + 4 * copies)
    return tokens * entries * workload.compute_bytes
