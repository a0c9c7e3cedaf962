"""Trials of what a model or a kernel can do."""

import pytest
import torch

from grpo.utils.oom import tried


def test_a_trial_ends_in_a_result_or_a_reason() -> None:
    def refuse() -> None:
        raise NotImplementedError("no kernel")

    assert tried(lambda: 3) == (3, None)
    result, reason = tried(refuse)
    assert result is None
    assert "no kernel" in str(reason)


def test_memory_that_runs_out_says_nothing_of_a_model() -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        tried(run_out)
