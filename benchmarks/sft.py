"""Memory of a step of supervised fine-tuning by component: the plan of an update, and the terms in which it differs.

Weights, gradients, optimizer state, activations and shards are the plan's own (`grpo.planning`). A supervised
step differs in the loss, in attention, and in what an older library keeps. Functions return bytes unless stated
otherwise.
"""

from dataclasses import dataclass, replace

from grpo.planning import memory
from grpo.planning.activations import head_backward, layer_kept
from grpo.planning.fit import HEADROOM
from grpo.planning.persistent import Components, trained, weights
from grpo.planning.shape import Shape
from grpo.planning.workload import Workload

LOGITS = {
    "transformers 4.38": (12, 12, 4),
    "transformers 4.48": (14, 12, 2),
    "transformers 5": (10, 12, 2),
    "fast_loss": (8, 8, 0),
    "Qwen": (12, 12, 0),
    "fast_loss, transformers 4.48": (10, 8, 2),
    "torchtune": (8, 12, 0),
    "torchtune, chunked": (2.25, 2.25, 0),
    "LitGPT, chunked": (4, 4, 0),
    "LitGPT": (4, 6, 0),
    "torchtitan": (10, 12, 2),
    "TRL 1.10": (4, 8, 0),
    "TRL 1.10, autocast": (6, 12, 0),
}
"""Bytes per token and vocabulary entry in the forward pass, in the backward pass, and of the model's output, which some
loops hold during the backward pass.

In half precision logits take 2 bytes, and in float32 (a copy, its shifted copy, the log-softmax that autograd keeps,
the two gradients in its backward pass) 4 each:

- transformers 4.38 (modeling_llama.py): converts logits to float32 itself, copies them without the last token.
- transformers 4.48 (loss/loss_utils.py): the loss gets logits in half precision, converts and copies them.
- transformers 5: shifts the labels, not the logits.
- fast_loss (fms-acceleration, fused_ops/unsloth_lora): logits in float32 and their shifted copy, which its gradient
  replaces; with transformers 4.48 the caller still holds those in half precision.
- Qwen's own code (modeling_qwen.py): logits and a shifted copy in half precision, which autocast converts.
- torchtune (modules/transformer.py): the model converts its logits; the recipe deletes them before the backward pass.
- torchtune, chunked (modules/loss/ce_chunked_output_loss.py), compiled: all logits in half precision, and the gradient
  of an eighth of them; Inductor fuses the conversion with the softmax.
- LitGPT, chunked (litgpt/utils.py): logits and log-softmax in half precision, in chunks of 128 tokens that all stay.
- LitGPT: the same with logits in a single piece, whose gradient is as large.
- torchtitan (components/loss.py): as transformers 5.
- TRL 1.10 (trainer/grpo_trainer.py): the log-softmax of each sequence in the type of the logits; under autocast
  accelerate converts the logits.
"""
CHUNKED = ("Liger", "Cut Cross Entropy", "Unsloth", "prime-rl")
"""Losses that never hold all logits."""
RESERVED = ("max_memory_reserved", "reserved_bytes.all.peak", "nvidia-smi")
"""Meters of what the allocator has reserved."""


@dataclass(frozen=True)
class Step:
    """The settings of a supervised step that its memory follows from."""

    shape: Shape
    workload: Workload
    loss: str
    """The code that computes the loss: a key of `LOGITS`, one of `CHUNKED`, or `TRL`, whose head is in the plan."""
    holds_output: bool = False
    """Whether the loop holds the model's output during the backward pass."""
    accumulates: bool = True
    """Whether gradients of earlier micro-batches exist."""
    attention: str = "flash"
    """`flash` (FlashAttention-2, without mask or repeated keys), `sdpa` or `eager`."""
    masked: bool = False
    """Whether attention gets a mask, as with padding or a sliding window."""
    autocast: bool = True
    """Whether adapters in float32 are multiplied in half precision."""
    stream_bytes: int = 2
    """Bytes per number between layers: 4 after PEFT's `prepare_model_for_kbit_training`."""
    selective: bool = False
    """Whether checkpointed layers also keep the results of some operators (torchtitan)."""
    fused_norms: bool = False
    """Whether RMS norms keep their input in its own type (Liger, Unsloth)."""
    quantized_keeps_inputs: bool = False
    """Whether a quantized module keeps its input (bitsandbytes before 0.43.2, pull request 1270)."""
    quantized_shards: int = 1
    """Devices over which FSDP divides quantized weights (`bnb_4bit_quant_storage`)."""
    keeps_layer_gradients: bool = False
    """Whether the gradient of each checkpointed layer's input stays to the end of the backward pass. FSDP1 registers a
    hook on the inputs of a frozen unit, which a reentrant checkpoint around it detached, and removes it at the end
    (`_register_post_backward_reshard_only_hook` in torch/distributed/fsdp/_runtime_utils.py)."""
    frozen_float32: bool = False
    """Whether frozen weights are held in float32, and only a layer of them in half precision (prime-rl)."""
    optimizer_in_backward: bool = False
    """Whether each parameter is updated, and its gradient freed, during the backward pass."""
    meter: str = "max_memory_allocated"
    """What was read."""


def planned(step: Step) -> Components:
    """Return the components of the moment with the most memory."""
    return max(moments(step), key=lambda parts: sum(parts.values()))


def moments(step: Step) -> list[Components]:
    """Return the components at the head, in the last layer of the backward pass, and in the optimizer's step."""
    shape, workload = step.shape, step.workload
    tokens, kept = workload.microbatch, kept_of_layer(step)
    masked = workload.sequence if step.masked else 0
    passing = memory.backward(shape, workload, tokens, masked, head=0.0, kept=tokens * kept)
    layers = memory.inputs_on_device(shape, workload)
    stream = tokens * shape.hidden_size * (step.stream_bytes - workload.compute_bytes) * layers
    if workload.checkpointing:
        passing["activations"] += stream + (tokens * selected(shape, workload) if step.selective else 0.0)
    at_head = passing | {"backward": loss(step)}
    if step.keeps_layer_gradients:
        passing["activations"] += tokens * shape.hidden_size * step.stream_bytes * shape.num_hidden_layers
    if step.attention == "eager":
        passing["backward"] += eager_backward(step)
    found = [at_head, passing, memory.optimizer_step(shape, workload)]
    if not step.accumulates:  # no gradients at first, and at the end no activations of other layers
        at_head["gradients"] = 0.0
        found.append(passing | {"activations": 0.0 if workload.checkpointing else tokens * kept})
        passing["gradients"] = min(passing["gradients"], head_gradient(shape, workload))
    if step.optimizer_in_backward:
        largest = trained(shape, workload)[1] * shape.embeddings
        found = [parts | {"gradients": largest, "optimizer step": largest} for parts in (at_head, passing)]
    return [as_metered(step, parts) for parts in found]


def as_metered(step: Step, parts: Components) -> Components:
    """Return the components that the meter counts, with divided quantized weights.

    PyTorch's readings do not have the context. The allocator's reserved memory, which nvidia-smi shows too, has its
    fragments, for which every plan leaves `HEADROOM` free. FSDP1 unshards embedding and head together, and two layers.
    """
    parts = parts | {"context": parts["context"] if step.meter == "nvidia-smi" else 0.0}
    if step.frozen_float32 and step.workload.adapter:
        parts["weights"] *= 4 / step.workload.weight_bytes
    if step.quantized_shards > 1:
        packed = weights(step.shape, step.workload)
        layer = packed / step.shape.num_hidden_layers
        root = 2 * step.shape.embeddings * step.workload.weight_bytes
        held = 0.0 if step.workload.sharding.offload_weights else packed / step.quantized_shards
        parts |= {"weights": held, "unsharded weights": root + 2 * layer}
    if step.meter in RESERVED:
        parts["fragments"] = sum(parts.values()) * HEADROOM / (1 - HEADROOM)
    return parts


def kept_of_layer(step: Step) -> float:
    """Return the bytes per token that autograd keeps of a layer.

    A batch of equal sequences gets no mask. FlashAttention-2 takes keys and values that are not repeated; eager
    attention keeps the softmax in float32 and in half precision (`eager_attention_forward` of transformers). PEFT
    multiplies an adapter in float32 without autocast in float32, and keeps such inputs.
    """
    shape, workload = step.shape, step.workload
    size = workload.compute_bytes
    tokens, masked = workload.microbatch, workload.sequence if step.masked else 0
    kept = layer_kept(shape, workload, tokens, masked) / tokens
    if step.attention != "flash" and not masked:
        kept += 2 * size * (shape.query_width - shape.kv_width)
    if step.attention == "eager":
        kept += (4 + size) * shape.num_attention_heads * workload.sequence
    if workload.adapter and workload.adapter.size > size and not step.autocast:
        adapted = [inputs for name, (inputs, _, _) in shape.linears().items() if workload.adapter.adapts(name)]
        kept += (workload.adapter.size - size) * sum(adapted)
    if step.fused_norms:
        kept -= 2 * (4 - size) * shape.hidden_size
    if step.quantized_keeps_inputs:  # the output projection's input is kept by attention
        kept += size * (2 * shape.hidden_size + shape.active_width)
    return kept


def selected(shape: Shape, workload: Workload) -> float:
    """Bytes per token of the results that torchtitan's selective checkpointing keeps of all layers.

    These are attention's output and log-sum-exp, and the results of every second product: queries, values, the gate and
    the output of the feed-forward layer (distributed/activation_checkpoint.py).
    """
    numbers = 2 * shape.query_width + shape.kv_width + shape.intermediate_size + shape.hidden_size
    return shape.num_hidden_layers * (workload.compute_bytes * numbers + 4 * shape.num_attention_heads)


def eager_backward(step: Step) -> float:
    """Bytes of the gradients of attention's softmax: in half precision, and in and out of the softmax in float32."""
    workload = step.workload
    scores = workload.microbatch * step.shape.num_attention_heads * workload.sequence
    return scores * (workload.compute_bytes + 8)


def loss(step: Step) -> float:
    """Return the bytes of logits and loss, and of the gradients of head and hidden states."""
    shape, workload = step.shape, step.workload
    tokens, size = workload.microbatch, workload.compute_bytes
    head = head_gradient(shape, workload)
    if step.loss == "TRL":
        return head_backward(shape, workload, tokens)
    if step.loss in CHUNKED:
        return head + tokens * size * shape.hidden_size + chunk(step)
    forward, backward, output = LOGITS[step.loss]
    in_backward = backward + output * step.holds_output
    entries = tokens * shape.vocab_size
    return max(entries * forward, entries * in_backward + head)


def head_gradient(shape: Shape, workload: Workload) -> float:
    """Bytes of the gradient of the output embedding."""
    return 0.0 if workload.adapter else float(workload.weight_bytes * shape.embeddings)


def chunk(step: Step) -> float:
    """Bytes of a chunk of logits: Liger's in half precision and float32 (ops/fused_linear_cross_entropy.py).

    Liger divides the tokens into about vocabulary / hidden size chunks of a power of two; Cut Cross Entropy holds a
    tile per multiprocessor, which is nothing here (2411.09009); Unsloth has four chunks. prime-rl has chunks of 2,048
    entries of the vocabulary, twice in half precision and three times in float32 (trainer/models/layers/lm_head.py).
    """
    tokens, shape = step.workload.microbatch, step.shape
    if step.loss == "prime-rl":
        return tokens * 2048 * 16.0
    if step.loss == "Liger":
        pieces = -(-shape.vocab_size // shape.hidden_size)
        tokens_at_once = 1 << (-(-tokens // pieces) - 1).bit_length()
        return tokens_at_once * shape.vocab_size * 6.0
    return 0.0 if step.loss == "Cut Cross Entropy" else tokens / 4 * shape.vocab_size * 10


def with_unquantized_float32(step: Step) -> Step:
    """Return the step after PEFT's `prepare_model_for_kbit_training`: float32 in all but 4-bit weights."""
    return replace(step, stream_bytes=4, workload=replace(step.workload, weight_bytes=4))
