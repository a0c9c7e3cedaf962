"""The exceptions that mean OOM."""

import torch
from accelerate.utils.memory import should_reduce_batch_size

TEXTS = (
    "error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA driver error: device not ready",
    "CUDA driver error: unknown error",
)
"""Of the CUDA runtime and driver (`CUDA error: …`, `CUDA driver error: …`), Triton, cuBLAS and cuDNN, which allocate
outside of PyTorch's allocator; the last two are WSL2's, where the driver cannot map memory that it reports as free."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or "CUDNN_STATUS_NOT_SUPPORTED" in str(error):
        return False
    return should_reduce_batch_size(error) or any(text in str(error) for text in TEXTS)
