"""A trainer of a configuration, up to the process group that transformers makes for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from grpo.config.resolve import resolve
from grpo.data.task import load_task
from grpo.run.trainer import make_trainer
from grpo.tools.running import Tools


class GroupMade(BaseException):
    """Raised in the place of a process group, with its backend."""


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        (("shard=fsdp2_offload",), "cpu:gloo,cuda:nccl"),
        (("+train.fsdp=full_shard offload",), "cpu:gloo,cuda:nccl"),
        (("shard=fsdp2_offload", "+train.ddp_backend=gloo"), "gloo"),
        (("shard=fsdp2",), "nccl"),
    ],
)
def test_gradients_that_are_offloaded_can_be_clipped(
    composed: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    backend: str,
) -> None:
    def init_process_group(backend: str, **options: Any) -> None:
        raise GroupMade(backend)

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    config = composed(*overrides)
    config.reward = {}
    problems = load_task(config.task)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    with pytest.raises(GroupMade, match=f"^{backend}$"):
        make_trainer(resolve(config, None), tmp_path, problems, None, {}, Tools())
