"""Memory of activations in a layer and in the head: bytes per token, or per micro-batch if stated."""

from grpo.planning.shape import QK_NORM, SANDWICH, Shape
from grpo.planning.workload import Workload

HEAD_TILE = (4096, 32768)
"""Tokens and vocabulary entries that TRL's head computes at once (trl/kernels/chunked_logprob.py)."""

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linear modules whose input is also the input of another."""


def layer_activations(shape: Shape, workload: Workload) -> float:
    """Bytes per token that autograd keeps of a layer.

    Two RMS norms keep their input in float32, and the normalized input if their own weight is trained; linear modules
    keep their input if their weight is trained, and LoRA a copy per module; attention keeps queries, keys and values
    (repeated per query head, because a mask is given), its output, its log-sum-exp and the mask of a separate sequence,
    which is the maximum, because shared prompts need no mask; SwiGLU keeps the gate, its activation, the other half and
    their product. Softmax over the sequence is not kept (FlashAttention,
    2205.14135).
    """
    hidden, query, kv, width = shape.hidden_size, shape.query_width, shape.kv_width, shape.active_width
    size = workload.compute_bytes
    norms = 2 * 4 * hidden
    if shape.model_type in SANDWICH:  # a norm before and one after each half, normalized in float32
        norms = 4 * (4 if workload.adapter else 8 - size) * hidden
    if shape.model_type in QK_NORM:
        norms += (4 if workload.adapter else 4 + size) * (query + kv)
    attention = size * 4 * query + 4 * shape.num_attention_heads + size * workload.sequence
    feed_forward = size * 3 * width
    if workload.adapter is None:
        norms += (4 if shape.model_type in SANDWICH else 2) * size * hidden
        inputs = 2 * hidden + width
        if workload.weight_bytes != size:  # autocast makes a copy per module
            inputs = 3 * hidden + query + 2 * hidden + width
            norms += 2 * (4 - size) * hidden
        inputs *= size
    else:
        inputs = adapter_inputs(shape, workload)
    mixture = 4 * shape.num_experts + size * 4 * hidden * shape.num_experts_per_tok if shape.num_experts else 0
    return norms + attention + feed_forward + inputs + mixture


def masks(shape: Shape, workload: Workload) -> int:
    """Bytes per token of the masks that all layers share, a byte per token of the sequence: of full attention and, in a
    model with sliding windows, of the window (transformers/masking_utils.py).
    """
    return workload.sequence * (2 if shape.num_sliding_layers else 1)


def adapter_inputs(shape: Shape, workload: Workload) -> int:
    """Bytes per token that autograd keeps of a layer's adapters: the inputs of both matrices.

    Each module has a copy of its input, because PEFT casts it to the adapter's type and autocast back, or because of
    dropout, which also keeps a mask: a byte per number on a GPU, a number of the adapter's type on a CPU (ATen's
    Dropout.cpp). An adapter in the type of the computation without dropout needs no copy: modules with the same input
    share it, and the output projection's is attention's output (peft/tuners/lora/layer.py).
    """
    adapter = workload.adapter
    if adapter is None:
        return 0
    named = {name: inputs for name, (inputs, _, _) in shape.linears().items() if adapter.adapts(name)}
    shared = adapter.size == workload.compute_bytes and not adapter.dropout
    places = {SAME_INPUT.get(name, name) if shared else name: inputs for name, inputs in named.items()}
    if shared:
        places.pop("o_proj", None)
    mask = sum(named.values()) * (1 if workload.device == "cuda" else adapter.size) if adapter.dropout else 0
    return workload.compute_bytes * (sum(places.values()) + len(named) * adapter.rank) + mask


def layer_backward(shape: Shape, workload: Workload) -> float:
    """Temporary bytes per token in the backward pass of a layer: gradients of the feed-forward layer.

    Adapters in it add the gradient of a copy of an input.
    """
    adapter = workload.adapter
    adapted = adapter is not None and any(map(adapter.adapts, FEED_FORWARD))
    wide = workload.compute_bytes * (4 if adapted else 3)
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
