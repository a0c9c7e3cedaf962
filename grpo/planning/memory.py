"""What a run takes in memory, by phase and component: arithmetic on the architecture's numbers, no torch.

All functions return bytes. Which tensors live when was read from the libraries' source and from what autograd keeps of
a layer; `benchmarks/simulation.py` compares the sum with PyTorch's `MemTracker`, which knows none of these formulas.
"""

from grpo.limits import CONTEXT, GB
from grpo.planning.shape import QK_NORM, SANDWICH, Shape
from grpo.planning.workload import Adapter, Job

HOST = {"cuda": 2.5 * GB, "cpu": 0.55 * GB}
"""A Python process with the libraries loaded, and what they keep."""
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
"""Numbers that an optimizer keeps for each parameter."""
BLOCK = 256
"""Numbers that share a scale in an 8-bit optimizer state of bitsandbytes."""
TRANSFER = 3.0 * GB
"""What is on its way to a vLLM server: its two buffers of 1 GB, and merged copies that wait for one."""
SLEEPING = 0.3 * GB
"""What a sleeping vLLM engine still holds: CUDA graphs and its communication buffers."""
CPU_FRAGMENTS = 0.4
"""What malloc loses, as a share of what comes and goes: 1.1 to 1.6 times the tensors in benchmarks/update_cpu.json."""

Components = dict[str, float]


def weights(shape: Shape, job: Job) -> float:
    """Bytes of the model's weights.

    NF4: half a byte a number, and for 64 numbers a scale of 4 bytes, or with double quantization one of 1 byte and
    4 bytes for 256 of these (2305.14314, section 3).
    """
    if not job.quantized:
        return shape.parameters() * job.weight_bytes
    packed = sum(inputs * outputs * count for inputs, outputs, count in shape.linears().values())
    scale = (1 + 4 / 256) / 64 if job.double_quantized else 4 / 64
    packed_bytes = 0.5 + scale if job.quantized == 4 else 1.0
    return packed * packed_bytes + (shape.parameters() - packed) * job.weight_bytes


def adapter_parameters(shape: Shape, adapter: Adapter) -> int:
    """Number of LoRA parameters, rank x (inputs + outputs) a module (2106.09685, section 4).

    With `all-linear` PEFT adapts the router of a mixture too, and each expert: its fused gate and upper half with twice
    the rank (peft/utils/transformers_weight_conversion.py).
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
    """Tell whether an adapter changes the experts of a mixture; PEFT does so in every family it knows but one."""
    return bool(shape.mixtures and adapter and adapter.modules is None and shape.model_type != "qwen2_moe")


def adapted_experts(shape: Shape, job: Job) -> float:
    """Bytes of the weights of a layer's experts with their adapters added, which PEFT keeps for the backward pass."""
    return float(job.compute_bytes * shape.experts) if adapts_experts(shape, job.adapter) else 0.0


def unpacked(shape: Shape, job: Job) -> float:
    """Bytes of the largest linear module's weight, unpacked from 4 bits while it is multiplied with; else none."""
    largest = max(inputs * outputs for inputs, outputs, _ in shape.linears().values())
    return job.compute_bytes * largest if job.quantized else 0.0


def trained(shape: Shape, job: Job) -> tuple[float, float]:
    """Number of parameters that are trained, and bytes of a number in them and in their gradients."""
    if job.adapter:
        return adapter_parameters(shape, job.adapter), job.adapter.number_bytes
    return shape.parameters(), 4 if job.float32_training else job.weight_bytes


def optimizer_state(shape: Shape, job: Job) -> float:
    """Bytes of the optimizer's state.

    PyTorch's optimizers keep numbers of the parameter's type, those of bitsandbytes float32, or in 8 bits 1 byte and a
    scale of 4 bytes for 256 numbers; of embeddings transformers has these keep float32 all the same.
    """
    count, size = trained(shape, job)
    name = job.optimizer.removeprefix("paged_")
    states = next((number for known, number in STATES.items() if name.startswith(known)), 2)
    if "8bit" in name:
        embeddings = 0 if job.adapter else shape.embeddings
        return states * ((count - embeddings) * (1 + 4 / BLOCK) + embeddings * 4)
    if "32bit" in name or "bnb" in name or name.startswith("ademamix") or name != job.optimizer:
        size = 4
    return count * states * size


def kv_cache(shape: Shape, job: Job) -> float:
    """Bytes of keys and values of all rows at full length; a layer with a sliding window keeps only the window."""
    length = job.row
    seen = length * (shape.num_hidden_layers - shape.num_sliding_layers)
    seen += min(length, shape.sliding_window or length) * shape.num_sliding_layers
    return job.rows * seen * 2 * shape.kv_width * job.compute_bytes


def persistent(shape: Shape, job: Job) -> Components:
    """What is on the device in every phase once the first step is done."""
    base = weights(shape, job)
    count, size = trained(shape, job)
    copied = job.float32_training and job.adapter is None and job.weight_bytes < 4 and not job.offload_optimizer
    parts = {
        "master weights": count * 4 / job.optimizer_shards if copied else 0.0,
        "context": CONTEXT if job.device == "cuda" else 0.0,
        "process": HOST["cpu"] if job.device == "cpu" else 0.0,
        "weights": 0.0 if job.offload_weights else base / job.weight_shards,
        "adapter": count * size / job.weight_shards if job.adapter else 0.0,
        "reference": base / job.weight_shards if job.reference and not job.offload_weights else 0.0,
    }
    if job.weight_shards > 1 or job.offload_weights:  # the layer at work and the next are whole
        parts["gathered layers"] = 2 * base / shape.num_hidden_layers
    if not (job.offload_optimizer or job.optimizer.startswith("paged_")):
        parts["optimizer"] = optimizer_state(shape, job) / job.optimizer_shards
    if job.vllm_share:
        parts["vllm"] = SLEEPING if job.vllm_sleeps else job.vllm_share * job.card
    return parts


def rollout(shape: Shape, job: Job) -> Components:
    """While completions are generated: by vLLM in its share, else by the policy in the larger of two moments.

    One is the prompts' pass through a layer; the other the last token, when the logits have been copied in float32 for
    temperature, softmax and sampling, and a layer's keys and values are repeated for each query head, as a mask needs.
    """
    parts = persistent(shape, job)
    if job.vllm_share:
        return parts | {"vllm": job.vllm_share * job.card}
    if job.on_server:
        return parts | {"transfer": TRANSFER}
    logits = job.rows * shape.vocab_size * (job.compute_bytes + 12 + 16 * job.sampling_filter)
    repeated = job.rows * job.row * 2 * shape.query_width * job.compute_bytes
    mask = job.prompt * (1 + job.compute_bytes)
    prefill = job.rows * job.prompt * (layer_forward(shape, job) + mask)
    return parts | {
        "kv cache": kv_cache(shape, job),
        "activations": max(prefill, repeated),
        "logits": logits,
        "unpacked": unpacked(shape, job),
    }


def logprobs(shape: Shape, job: Job) -> Components:
    """While completions are scored without a gradient: one layer of a micro-batch, then the head."""
    layer = layer_forward(shape, job) + job.sequence * job.compute_bytes
    return persistent(shape, job) | {
        "activations": job.microbatch * max(layer, job.compute_bytes * 2 * shape.hidden_size),
        "head": head_forward(shape, job, job.scored),
        "unpacked": unpacked(shape, job),
    }


def update(shape: Shape, job: Job) -> Components:
    """While the policy learns: the larger of a micro-batch's backward pass, with the step's earlier gradients there,
    and the optimizer's step.

    The backward pass is at its peak in the head, when all layers' activations are kept, or in the last layer. With
    checkpointing (1604.06174) a layer keeps its input, and one layer at a time is computed again; that is not there
    yet in the head.
    """
    tokens = job.microbatch
    count, size = trained(shape, job)
    kept = tokens * layer_activations(shape, job)
    inputs = tokens * job.compute_bytes * shape.hidden_size * shape.num_hidden_layers
    final = tokens * (4 + (2 if job.adapter else 3) * job.compute_bytes) * shape.hidden_size  # norm and head
    head = head_backward(shape, job, job.scored)
    layer = tokens * layer_backward(shape, job)
    experts = adapted_experts(shape, job)
    activations = final + (float(inputs) if job.checkpointing else kept * shape.num_hidden_layers)
    activations += experts * (1 if job.checkpointing else shape.mixtures)
    work = max(head, kept + layer if job.checkpointing else layer)
    gradients = count * size / job.gradient_shards
    if job.gradients_on_host or job.offload_optimizer:  # that of one matrix, and what it is added to
        gradients = 0.0 if job.adapter else 2.0 * size * shape.hidden_size * shape.intermediate_size
    if job.weight_bytes > job.compute_bytes and not job.quantized:  # autocast keeps its copies until the pass is over
        activations += job.compute_bytes * sum(i * o * n for i, o, n in shape.linears().values())
    stays = persistent(shape, job) | {"gradients": gradients}
    backward = stays | {"activations": activations, "backward": work, "unpacked": unpacked(shape, job)}
    if job.device == "cpu":
        backward["fragments"] = CPU_FRAGMENTS * (activations + work)
    # torch's `foreach` holds the square roots of all second moments at once
    at_once = job.optimizer == "adamw_torch" and job.device == "cuda" and not job.gradients_on_host
    roots = count * size / job.optimizer_shards if at_once else 0.0
    return max(backward, stays | {"optimizer step": roots}, key=lambda parts: sum(parts.values()))


def phases(shape: Shape, job: Job) -> dict[str, Components]:
    """Return bytes on the device by phase and component; what is zero is left out."""
    loading = {name: size for name, size in persistent(shape, job).items() if name != "optimizer"}
    if job.quantized:  # each tensor arrives whole and is then packed
        loading["loading"] = job.weight_bytes * shape.hidden_size * shape.intermediate_size
    if job.vllm_share:
        loading["vllm"] = job.vllm_share * job.card
    found = {
        "load": loading,
        "rollout": rollout(shape, job),
        "logprobs": logprobs(shape, job),
        "update": update(shape, job),
    }
    return {phase: {name: size for name, size in parts.items() if size} for phase, parts in found.items()}


def peak(shape: Shape, job: Job, *names: str) -> float:
    """Return the bytes of the largest phase, or of the largest of those named."""
    return max(sum(parts.values()) for phase, parts in phases(shape, job).items() if not names or phase in names)


def host(shape: Shape, job: Job) -> Components:
    """Return bytes of host memory by component, of all processes of this machine together.

    Where the devices' memory is the host's, what they hold is not among them. Several processes without sharding each
    read the weights into host memory before they move them (TRL's `device_map=None`).
    """
    count, size = trained(shape, job)
    parts = {"processes": HOST[job.device] * job.processes}
    if job.device == "cuda" and job.processes > 1:
        parts["loading"] = weights(shape, job) * (1 if job.weight_shards > 1 else job.processes)
    if job.offload_weights:
        parts["offloaded weights"] = weights(shape, job) * (2 if job.reference else 1)
    if job.offload_optimizer or job.optimizer.startswith("paged_"):
        parts["offloaded optimizer"] = optimizer_state(shape, job)
    if job.offload_optimizer and job.float32_training and job.adapter is None:
        parts["offloaded master weights"] = count * 4.0
    if job.gradients_on_host or job.offload_optimizer:
        parts["offloaded gradients"] = count * size
    return {name: size for name, size in parts.items() if size}


HEAD_TILE = (4096, 32768)
"""Tokens and words of the vocabulary that TRL's head computes at once (trl/kernels/chunked_logprob.py)."""


def layer_activations(shape: Shape, job: Job) -> float:
    """Bytes a token that autograd keeps of one layer.

    Two RMS norms keep their input in float32, and where their own weight is trained the normalized input; linear
    modules keep their input where their weight is trained, and LoRA a copy of its own for each module; attention keeps
    queries, keys and values (repeated for each query head, as a mask needs it), its output, its log-sum-exp and the
    mask; SwiGLU keeps the gate, its activation, the other half and their product. Softmax over the sequence is not
    kept (FlashAttention, 2205.14135).
    """
    hidden, query, kv, width = shape.hidden_size, shape.query_width, shape.kv_width, shape.active_width
    size = job.compute_bytes
    norms = 2 * 4 * hidden
    if shape.model_type in SANDWICH:  # a norm before and one behind each half, normalized in float32
        norms = 4 * (4 if job.adapter else 8 - size) * hidden
    if shape.model_type in QK_NORM:
        norms += (4 if job.adapter else 4 + size) * (query + kv)
    attention = size * 4 * query + 4 * shape.num_attention_heads + size * job.sequence
    feed_forward = size * 3 * width
    if job.adapter is None:
        norms += (4 if shape.model_type in SANDWICH else 2) * size * hidden
        inputs = 2 * hidden + width
        if job.weight_bytes != size:  # autocast makes a copy for each module
            inputs = 3 * hidden + query + 2 * hidden + width
            norms += 2 * (4 - size) * hidden
    else:
        named = [
            (inputs, outputs)
            for name, (inputs, outputs, _) in shape.linears().items()
            if job.adapter.modules is None or name in job.adapter.modules
        ]
        inputs = sum(inputs for inputs, _ in named) + len(named) * job.adapter.rank
    mixture = 4 * shape.num_experts + size * 4 * hidden * shape.num_experts_per_tok if shape.num_experts else 0
    return norms + attention + feed_forward + size * inputs + mixture


def layer_backward(shape: Shape, job: Job) -> float:
    """Bytes a token that the backward pass of one layer takes for a while: gradients of the feed-forward layer."""
    wide = job.compute_bytes * (4 if job.adapter else 3)
    return wide * shape.active_width + (4 + 2 * job.compute_bytes) * shape.hidden_size


def layer_forward(shape: Shape, job: Job) -> float:
    """Bytes a token that one layer takes for a while without gradient: input, float32 in the norm, SwiGLU's halves."""
    size = job.compute_bytes
    attention = size * (2 * shape.hidden_size + 4 * shape.query_width) + 4 * shape.hidden_size
    return max(attention, size * (2 * shape.hidden_size + 3 * shape.active_width))


def head_backward(shape: Shape, job: Job, scored: int) -> float:
    """Bytes that the head's backward pass takes: a tile of logits, and float32 sums of the gradients."""
    total = head_tile(shape, job, scored, copies=6) + scored * shape.hidden_size * (4 + job.compute_bytes)
    if job.adapter is None:
        total += shape.embeddings * (4 + job.weight_bytes)
    return total


def head_forward(shape: Shape, job: Job, scored: int) -> float:
    """Bytes that the head takes to score so many tokens."""
    return head_tile(shape, job, scored, copies=4) + scored * shape.hidden_size * job.compute_bytes


def head_tile(shape: Shape, job: Job, scored: int, copies: int) -> float:
    """Bytes of the logits that are computed at once.

    On a CPU, without Triton, there are float32 copies of them; what a small vocabulary leaves unused is never touched.
    """
    tokens, words = min(scored, HEAD_TILE[0]), HEAD_TILE[1]
    if job.device == "cpu":
        return tokens * min(shape.vocab_size, words) * (job.compute_bytes + 4 * copies)
    return tokens * words * job.compute_bytes
