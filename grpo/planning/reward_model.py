"""Memory of reward models: their weights in every phase, and their activations while they score."""

from dataclasses import replace

from grpo.planning.activations import layer_forward
from grpo.planning.workload import Workload


def weights(workload: Workload) -> float:
    """Bytes of the weights of all reward models, which have no output embedding."""
    return sum(
        size * (shape.parameters() - (0 if shape.tie_word_embeddings else shape.embeddings))
        for shape, size in workload.reward_models
    )


def activations(workload: Workload) -> float:
    """Bytes that the hungriest reward model takes to score a micro-batch without a gradient, layer by layer."""
    found = []
    for shape, size in workload.reward_models:
        own = replace(workload, compute_bytes=size, weight_bytes=size, adapter=None)
        layer = layer_forward(shape, own) + workload.sequence * size  # with the mask
        found.append(workload.microbatch * (layer + 2 * size * shape.hidden_size))
    return max(found, default=0.0)
