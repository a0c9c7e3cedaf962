"""The exceptions that mean OOM, and the retry of work in smaller parts."""

from collections.abc import Callable, Sequence, Sized
from typing import TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from grpo.utils.errors import DoesNotFit, described

Part = TypeVar("Part", bound=Sized)
Result = TypeVar("Result")

TEXTS = (
    "error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA driver error: device not ready",
    "CUDA driver error: unknown error",
    "Triton Error [HIP]: Code: 2",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "rocblas_status_memory_error",
    "MPS backend out of memory",
    "Invalid buffer size",
    "kIOGPUCommandBufferCallbackErrorOutOfMemory",
)
"""Messages of the CUDA runtime and driver (`CUDA error: …`, `CUDA driver error: …`), Triton, cuBLAS and cuDNN, which
allocate outside of PyTorch's allocator; two of WSL2, where the driver cannot map memory that it reports as free; the
same of AMD's libraries (`hipErrorOutOfMemory` is 2); and of PyTorch on a Mac, whose Metal also refuses a single large
tensor."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or "CUDNN_STATUS_NOT_SUPPORTED" in str(error):
        return False
    return should_reduce_batch_size(error) or any(text in str(error) for text in TEXTS)


def tried(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Return the result of a trial and None, or None and the reason why a model or a kernel cannot do this.

    An OOM says nothing of the model, and is raised.
    """
    try:
        return work(), None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None, described(error)


def smaller_until_it_fits(
    parts: Callable[[], Sequence[Part]],
    work: Callable[[Part], None],
    shrink: Callable[[Part | None], None],
    too_large: Callable[[Part | None], str],
    survives: Callable[[RuntimeError], bool] = is_out_of_memory,
    anywhere: Callable[[bool, bool], Sequence[bool]] = lambda *flags: flags,
) -> None:
    """Do some work part by part, and after an OOM in smaller parts, until all of it fits.

    An indivisible part may fail once, because of fragmented memory, but not twice in a row.

    Args:
        parts: returns the remaining work, in the largest parts that are known to fit; an indivisible part has length 1.
        work: does a part.
        shrink: makes `parts` return smaller parts, given the part that ran out of memory, or None if another process
            did.
        too_large: returns the advice for an indivisible part that does not fit, given the same argument.
        survives: returns whether to retry after an exception.
        anywhere: returns for each flag whether it is true on any process.

    Raises:
        DoesNotFit: an indivisible part does not fit.
    """
    alone = False
    while True:
        failed, reason = None, None
        for part in parts():
            try:
                work(part)
            except RuntimeError as error:
                if not survives(error):
                    raise
                failed, reason = part, error.with_traceback(None)  # whose frames keep tensors in memory
                break
        again, alone = alone, failed is not None and len(failed) == 1
        any_failed, hopeless = anywhere(failed is not None, alone and again)
        if not any_failed:
            return
        if hopeless:
            raise DoesNotFit(too_large(failed)) from reason
        shrink(failed)


def twice(work: Callable[[], Result], too_large: str, survives: Callable[[RuntimeError], bool]) -> Result:
    """Return the result of indivisible work, which is done again after an OOM; DoesNotFit after another."""
    results: list[Result] = []

    def do(part: range) -> None:
        results.append(work())

    smaller_until_it_fits(lambda: [range(1)], do, lambda failed: None, lambda failed: too_large, survives)
    return results[0]


def half(rows: int, group: int = 1) -> int:
    """Return where to cut a number of rows in two, between groups if there are several."""
    groups = rows // group
    return groups // 2 * group if groups > 1 else rows // 2


def halves(rows: range, limit: int | None, group: int = 1) -> list[range]:
    """Divide prompts in two, and these again, until no part has more than `limit`; groups stay together if they can."""
    if not rows:
        return []
    if len(rows) <= (limit or len(rows)):
        return [rows]
    middle = half(len(rows), group)
    return [*halves(rows[:middle], limit, group), *halves(rows[middle:], limit, group)]
