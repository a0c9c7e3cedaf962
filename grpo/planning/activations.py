"""Memory of activations in a layer and in the head, bytes: of a micro-batch, or per token if stated."""

from collections.abc import Mapping

from grpo.planning.adapters import FEED_FORWARD, adapts
from grpo.planning.families import EAGER, GATED, PARALLEL, QK_NORM, SANDWICH, SCALED_IN_FLOAT32, UNGATED
from grpo.planning.shape import Linears, Shape
from grpo.planning.workload import Workload
from grpo.utils.limits import CACHED_LOGITS

HEAD_TILE = (4096, 32768)
"""Tokens and vocabulary entries that TRL's head computes at once (trl/kernels/chunked_logprob.py)."""
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "in_proj_ba": "in_proj_qkvz"}
SAME_INPUT |= {"in_proj_z": "in_proj_qkv", "in_proj_b": "in_proj_qkv", "in_proj_a": "in_proj_qkv"}
SAME_INPUT |= {"q_a_proj": "q_proj", "kv_a_proj_with_mqa": "q_proj"}
"""Linear modules whose input is also the input of another."""
OUTPUTS = ("o_proj", "out_proj", "proj")
"""Names of the output projection, whose input is attention's output."""


def layer_kept(shape: Shape, workload: Workload, tokens: int, masked: int, by_state: bool = False) -> float:
    """Bytes that autograd keeps of a layer for a micro-batch.

    Args:
        tokens: of the micro-batch.
        masked: length of its sequences if they have masks, otherwise 0.
        by_state: of a layer with a state in the place of attention.
    """
    tile = tiled(shape, workload, tokens)
    inputs = tokens * workload.compute_bytes * shape.hidden_size if tile < tokens else 0
    mixer = recurrent_kept(shape, workload) if by_state else attention_kept(shape, workload, masked)
    if shape.model_type in PARALLEL:  # both have the same norm, and the norms' inputs are counted once
        mixer = attention_kept(shape, workload, masked) + recurrent_kept(shape, workload) - 2 * 4 * shape.hidden_size
    mixer += per_layer_kept(shape, workload)
    if shape.altup:
        mixer += shape.altup.kept(workload.compute_bytes, shape.hidden_size, workload.adapter is not None)
    return tokens * mixer + inputs + tile * mlp_kept(shape, workload)


def tiled(shape: Shape, workload: Workload, tokens: int) -> int:
    """Tokens that a feed-forward layer computes at once; mixtures of experts have no tiles."""
    return tokens if shape.num_experts else min(tokens, workload.mlp_tile or tokens)


def attention_kept(shape: Shape, workload: Workload, masked: int) -> float:
    """Bytes per token that autograd keeps of attention and norms.

    Two RMS norms keep their input in float32, and the normalized input if their own weight is trained; linear modules
    keep their input if their weight is trained, and LoRA a copy per module; attention keeps queries, keys, values, its
    output and its log-sum-exp. With a mask, keys and values are repeated per query head, and a row of the mask is kept.
    Softmax over the sequence is not kept (FlashAttention, 2205.14135).
    """
    hidden, query, kv, size = shape.hidden_size, shape.query_width, shape.kv_width, workload.compute_bytes
    norms: float = 2 * 4 * hidden
    if shape.model_type in SANDWICH:  # a norm before and one after each half, normalized in float32
        norms = 4 * (8 - size if workload.adapter is None and shape.model_type.startswith("gemma") else 4) * hidden
    if shape.model_type in QK_NORM:
        norms += (4 if workload.adapter else 4 + size) * (query + kv)
    attention = size * 2 * (query + (query if masked else kv)) + 4 * shape.num_attention_heads + size * masked
    if shape.latent:
        attention = (
            shape.latent.kept(size, workload.adapter is not None) + 4 * shape.num_attention_heads + size * masked
        )
    if shape.model_type in EAGER:
        attention += size * shape.num_attention_heads * (masked or workload.sequence)
    if shape.model_type in GATED:
        attention += 2 * size * query
        norms += 0 if workload.adapter else (8 - size) * hidden + (4 - size) * (query + kv)
    if shape.model_type in SCALED_IN_FLOAT32 and workload.adapter is None:
        norms += 2 * (4 - size) * hidden
    if workload.adapter is not None:
        return norms + attention + adapter_inputs(shape, shape.attention_linears(), workload)
    norms += (4 if shape.model_type in SANDWICH else 2) * size * hidden
    if workload.weight_bytes == size:
        return norms + attention + size * hidden
    return norms + attention + size * (3 * hidden + query) + 2 * (4 - size) * hidden  # autocast copies for each module


def recurrent_kept(shape: Shape, workload: Workload) -> float:
    """Bytes per token that autograd keeps of a layer with a state and of the norms beside it."""
    if not shape.recurrent:
        return 0.0
    hidden, size = shape.hidden_size, workload.compute_bytes
    linears, in_float32 = shape.recurrent.linears(hidden), shape.model_type in (*GATED, *SCALED_IN_FLOAT32)
    kept = shape.recurrent.kept(size, workload.adapter is not None) * in_chunks(shape, workload) + 2 * 4 * hidden
    if workload.adapter is not None:
        return kept + adapter_inputs(shape, linears, workload)
    copies = 1 if workload.weight_bytes == size else len(linears) - 1  # autocast's, for each module
    return kept + 2 * (4 if in_float32 else size) * hidden + copies * size * hidden


def in_chunks(shape: Shape, workload: Workload) -> float:
    """Tokens that a layer with a state computes for a token: it pads prompts and completions to whole chunks."""
    chunk, copies = shape.recurrent.chunk_size if shape.recurrent else 1, workload.completions_per_sequence
    lengths = [workload.prompt, *[workload.completion] * copies] if copies > 1 else [workload.sequence]
    return sum(-(-length // chunk) * chunk for length in lengths) / max(1, sum(lengths))


def per_layer_kept(shape: Shape, workload: Workload) -> float:
    """Bytes per token that autograd keeps of a layer's part of the embeddings for each layer."""
    if not shape.per_layer:
        return 0.0
    linears = {name: of for name, of in shape.per_layer.linears(shape.hidden_size).items() if name.endswith("_gate")}
    size, frozen = workload.compute_bytes, workload.adapter is not None
    kept = shape.per_layer.kept(size, shape.hidden_size, frozen) + shape.per_layer.held(size, frozen)
    return kept + adapter_inputs(shape, linears, workload)


def mlp_kept(shape: Shape, workload: Workload) -> float:
    """Bytes per token that autograd keeps of a feed-forward layer.

    SwiGLU keeps the gate, its activation, the other half and their product, a layer without a gate its activation;
    linear modules as those of attention.
    """
    hidden, width, size = shape.hidden_size, shape.active_width, workload.compute_bytes
    kept = 5 if shape.model_type in EAGER else 1 if shape.model_type in UNGATED else 3  # gpt-oss clamps the halves
    per_token = size * kept * width
    if shape.num_experts:
        per_token += 4 * shape.num_experts + size * 4 * hidden * shape.num_experts_per_tok
    if workload.adapter is not None:
        modules = shape.linears().items()
        linears = {name: of for name, of in modules if name in FEED_FORWARD}
        return per_token + adapter_inputs(shape, linears, workload)
    return per_token + size * ((hidden if workload.weight_bytes == size else 2 * hidden) + width)


def adapter_inputs(shape: Shape, linears: Linears, workload: Workload) -> float:
    """Bytes per token that autograd keeps of adapters of linear modules of a layer: the inputs of both matrices.

    Modules with the same input share it, and the output projection's is attention's output. With dropout each module
    has its own, and a mask: a byte per number on a GPU, a number of the adapter's type on a CPU (ATen's Dropout.cpp).

    Args:
        shape: of the model.
        linears: inputs, outputs and count of each module, by name.
        workload: of the run.
    """
    adapter = workload.adapter
    if adapter is None:
        return 0
    named = {name: inputs for name, (inputs, _, _) in linears.items() if adapts(shape, adapter, name)}
    ranks = workload.compute_bytes * len(named) * adapter.rank
    if adapter.copies:
        mask = (1 if workload.device == "cuda" else adapter.size) if adapter.dropout else 0
        return ranks + (workload.compute_bytes + mask) * sum(named.values())
    return ranks + workload.compute_bytes * sum(distinct(named).values())


def distinct(modules: Mapping[str, float]) -> dict[str, float]:
    """Return the modules of a layer, by name, whose inputs no other module or attention keeps."""
    first = {SAME_INPUT.get(name, name): inputs for name, inputs in modules.items()}
    return {name: inputs for name, inputs in first.items() if name not in OUTPUTS}


def masks(shape: Shape, masked: int) -> int:
    """Bytes per token of the masks that all layers share, a byte per token of a masked sequence.

    They are of full attention and, in a model with sliding windows, of the window (transformers/masking_utils.py).
    """
    return masked * (2 if shape.num_sliding_layers else 1)


def layer_backward(shape: Shape, workload: Workload, tokens: int) -> float:
    """Temporary bytes in the backward pass of a layer: gradients of the feed-forward layer.

    Adapters in it that copy their inputs add the gradient of a copy. Without copies two gradients of the width are
    left, or, beside tiles, tensors as wide as the model in the place of a tile's activations: both as simulated
    (benchmarks/simulation.py).
    """
    adapter, size, hidden = workload.adapter, workload.compute_bytes, tokens * shape.hidden_size
    wide = size * tiled(shape, workload, tokens) * shape.active_width
    adapted = adapter is not None and any(adapts(shape, adapter, name) for name in FEED_FORWARD)
    in_tiles = tiled(shape, workload, tokens) < tokens
    if adapter and adapted and not adapter.copies:
        return max(2.0 * wide, 9 * size * hidden - 4 * wide if in_tiles else 0.0)
    beside_tiles = 8.5 * size * hidden + 2 * wide if in_tiles else 0.0
    return max((4 if adapted else 3) * wide + (4 + 2 * size) * hidden, beside_tiles)


def recurrent_backward(shape: Shape, workload: Workload, tokens: int) -> float:
    """Temporary bytes in the backward pass of a layer with gated DeltaNet: of its feed-forward layer, or of the rule.

    Before the rule's, what is kept of the feed-forward layer, of the norm before it and of the gate is gone.
    """
    if not shape.recurrent:
        return 0.0
    gone = mlp_kept(shape, workload) * tiled(shape, workload, tokens) + 4 * shape.hidden_size * tokens
    gone += tokens * shape.recurrent.kept_of_norm(workload.compute_bytes, workload.adapter is not None)
    rule = tokens * in_chunks(shape, workload) * shape.recurrent.gradients()
    return max(layer_backward(shape, workload, tokens), rule - gone)


def layer_forward(shape: Shape, workload: Workload, tokens: int, masked: int) -> float:
    """Bytes that a layer takes for a while without gradient: input, float32 in the norm, SwiGLU's halves, the mask."""
    size, hidden = workload.compute_bytes, shape.hidden_size
    heads = shape.query_width + (shape.query_width if masked else shape.kv_width)
    attention = tokens * (size * (2 * hidden + 2 * heads) + 4 * hidden)
    tile = tiled(shape, workload, tokens)
    parts = 2 if tile == tokens else 3  # the outputs of all tiles, too
    mlp = tokens * size * parts * hidden + tile * size * 3 * shape.active_width
    rule = 0.0
    if shape.recurrent:
        rule = tokens * (shape.recurrent.working(size) * in_chunks(shape, workload) + size * 2 * hidden)
    return max(attention, mlp, rule) + tokens * (masked * size + masks(shape, masked))


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

    On a CPU, without Triton, they are fewer, float32 copies of them are made, and only the part that a small vocabulary
    fills is used.
    """
    tokens, entries = min(scored, HEAD_TILE[0]), HEAD_TILE[1]
    if workload.device == "cpu":
        return min(tokens * shape.vocab_size, CACHED_LOGITS) * (workload.compute_bytes + 4 * copies)
    return tokens * entries * workload.compute_bytes
