"""Numbers that the plan and the run share."""

GB = 2**30

CONTEXT = 0.6 * GB
"""What a process takes of a GPU outside of PyTorch's allocator: CUDA context and loaded kernels."""

USABLE = 0.9
"""The share of a card's memory that micro-batches and vLLM fill; the rest is for fragments and what else runs there."""

HOST_LIMIT = 0.95
"""The share of host memory beyond which a run stops itself before it is killed."""

UNMEASURED = 1024
"""Tokens of a micro-batch where memory is not measured: on a CPU more at once are not faster."""


ENGINE = 1.5 * GB
"""What vLLM needs beside weights and cache: activations of a batch, CUDA graphs."""
