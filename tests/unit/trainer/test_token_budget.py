"""How many tokens a micro-batch may have."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo.options import Update
from grpo.trainer import token_budget
from grpo.trainer.token_budget import UNMEASURED, TokenBudget
from grpo.utils.oom import is_out_of_memory
from tests.cuda_driver import GB, CudaDriver

CPU = torch.device("cpu")


def measured(tokens: int) -> TokenBudget:
    """A budget as on a card: `auto`, begun at a row of so many tokens."""
    budget = TokenBudget("auto", torch.device("cuda"))
    assert not budget.begun
    budget.begin(tokens)
    return budget


def test_auto_begins_at_the_longest_possible_row() -> None:
    budget = measured(700)
    assert (budget.tokens, budget.begun) == (700, True)


def test_auto_without_a_memory_reading_is_a_fixed_number() -> None:
    budget = TokenBudget("auto", CPU)
    assert budget.begun
    budget.watch()
    budget.grow(UNMEASURED)
    assert budget.tokens == UNMEASURED


def test_a_number_is_kept_until_memory_runs_out() -> None:
    budget = TokenBudget(1000, CPU)
    assert budget.begun
    budget.grow(1000)
    assert budget.tokens == 1000
    budget.halve(800)
    assert budget.tokens == 400


@pytest.mark.parametrize("setting", ["many", 0, -5, 2.5, None, True])
def test_anything_but_auto_and_positive_numbers_is_refused(setting: object) -> None:
    with pytest.raises(ValueError, match="max_tokens_per_microbatch"):
        Update(max_tokens_per_microbatch=setting)


@given(st.integers(100, 10**6), st.floats(0.01, 0.8), st.floats(0.01, 0.2))
def test_growth_stays_within_what_the_measurement_allows(tokens: int, occupied: float, taken: float) -> None:
    budget = measured(tokens)
    budget.occupied = int(occupied * 10**11)
    grown = budget.grown(tokens, peak=budget.occupied + taken * 10**11, total=10**11)
    assert tokens <= grown <= 2 * tokens
    predicted = budget.occupied + taken * 10**11 * grown / tokens
    assert grown == tokens or predicted <= 0.9 * 10**11 * (1 + 1e-9)


def test_growth_never_returns_to_what_did_not_fit() -> None:
    budget = measured(1000)
    budget.halve(1000)
    for _ in range(10):
        budget.tokens = budget.grown(budget.tokens, peak=1e6, total=1e11)
    assert budget.tokens == 999


def test_small_microbatches_are_no_reason_to_grow() -> None:
    assert measured(1000).grown(300, peak=1e6, total=1e11) == 1000


def test_auto_grows_within_the_gpus_share_of_the_process(
    cuda_driver: CudaDriver,
) -> None:
    gpu = torch.device("cuda")
    with pytest.raises(ValueError, match="index"):  # the check that a run must not meet in its second step
        torch.cuda.get_per_process_memory_fraction(gpu)
    cuda_driver.allocate(2 * GB)
    budget = TokenBudget("auto", gpu)
    budget.begin(1000)
    budget.watch()
    cuda_driver.allocate(4 * GB)
    cuda_driver.allocate(-4 * GB)
    budget.grow(1000)
    assert budget.tokens == 2000
    cuda_driver.fraction = 0.5
    budget.tokens = 1000
    budget.grow(1000)
    assert budget.tokens == int(1000 * (0.9 * 8 - 2) / 4)


def test_auto_leaves_what_wsl_holds_back(cuda_driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_budget, "held_back", lambda: 2 * GB)
    budget = TokenBudget("auto", torch.device("cuda"))
    budget.begin(1000)
    budget.watch()
    cuda_driver.allocate(8 * GB)
    budget.grow(1000)
    assert budget.tokens == int(1000 * 0.9 * 14 / 8)


def test_the_least_that_did_not_fit_on_any_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process, tokens in ((1, 600), (0, 1000), (2, 800)):
        monkeypatch.setenv("RANK", str(process))
        TokenBudget(5000, CPU, tmp_path / "out_of_memory.json").forbid(tokens)
    for process in range(3):
        monkeypatch.setenv("RANK", str(process))
        assert TokenBudget(5000, CPU, tmp_path / "out_of_memory.json").allowed() == 300


@pytest.mark.parametrize("content", ["", '{"tok', "{}", "[1]", '{"tokens": null}', "\xff"])
def test_a_torn_note_of_what_did_not_fit_is_none(tmp_path: Path, content: str) -> None:
    file = tmp_path / "out_of_memory.json"
    file.write_text(content, encoding="latin-1")
    budget = TokenBudget(5000, CPU, file)
    assert budget.allowed() == 5000
    budget.forbid(1000)
    assert TokenBudget(5000, CPU, file).allowed() == 500
    assert [left.name for left in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA driver error: device not ready"),
        RuntimeError("CUDA driver error: unknown error"),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("HIP error: out of memory"),
        RuntimeError("Triton Error [HIP]: Code: 2, Messsage: out of memory"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError(
            "MPS backend out of memory (MPS allocated: 9.06 GiB, other allocations: 5 MiB, max allowed: 9 GiB)"
        ),
        RuntimeError("Invalid buffer size: 19.86 GiB"),
    ],
)
def test_libraries_with_own_allocation_run_out_of_memory_too(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("shapes cannot be multiplied"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."),
        ValueError("out of memory."),
    ],
)
def test_other_errors_are_not_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_out_of_memory_is_recognized_on_every_device() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
