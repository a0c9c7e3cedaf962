"""What a run does before anything is loaded."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest
from omegaconf import DictConfig

from grpo.train import prepare_gpu, start_run
from grpo.utils.errors import ConfigError


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
    prepare_gpu(composed(*overrides).train)
    assert (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True") == expandable


def test_a_run_elsewhere_than_on_linux_is_one_line(
    composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="training, rewards and tools need Linux or macOS, and this is Windows"):
        start_run(composed(), tmp_path, [])
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"launch\.processes=2: several processes need Linux"):
        start_run(composed("launch.processes=2"), tmp_path, [])
    assert not list(tmp_path.iterdir())
