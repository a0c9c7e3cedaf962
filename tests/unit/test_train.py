"""What a run does before anything is loaded."""

import os
from collections.abc import Callable

import pynvml
import pytest
from omegaconf import DictConfig

from grpo.train import prepare_gpu


@pytest.mark.parametrize(
    ("overrides", "expandable"),
    [
        ((), True),
        (("generation=vllm_colocate",), True),
        (("generation=vllm_colocate", "train.vllm_enable_sleep_mode=true"), False),
        (("train.vllm_enable_sleep_mode=true",), True),
        (("generation=vllm_colocate", "train.vllm_tensor_parallel_size=2"), False),
        (("generation=vllm_server", "train.vllm_tensor_parallel_size=2"), True),
    ],
)
def test_segments_are_expandable_unless_the_engine_refuses_it(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], expandable: bool
) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # so that it is removed again
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    prepare_gpu(composed(*overrides))
    assert (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True") == expandable
