"""Numbers that the plan and the run share."""

GB = 2**30

CONTEXT = 0.6 * GB
"""GPU memory of a process outside of PyTorch's allocator, in bytes: CUDA context and loaded kernels."""

USABLE = 0.9
"""The share of GPU memory that micro-batches and vLLM fill; the rest is for fragments and other programs."""

HOST_LIMIT = 0.95
"""The share of host memory beyond which a run stops itself before it is killed."""

UNMEASURED = 1024
"""Tokens of a micro-batch where memory is not measured: on a CPU more at once are not faster."""


ENGINE = 1.5 * GB
"""Memory of vLLM beside weights and cache, in bytes: activations of a batch, CUDA graphs."""
