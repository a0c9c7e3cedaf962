"""The file that carries an adapter from the policy to vLLM; it is removed after loading."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file

from grpo.generation.vllm.policy_weights import unsharded

SHARED_MEMORY = Path("/dev/shm")
"""Where files stay in memory, on Linux."""


def adapter_weights(
    model: PeftModel, whole: Callable[[list[torch.nn.Parameter]], AbstractContextManager]
) -> dict[str, torch.Tensor]:
    """Return copies of the weights of a policy's adapter on the CPU, under the names of PEFT's files.

    All processes have to call this where the weights are sharded.

    Args:
        whole: a context in which parameters that ZeRO-3 shards are whole.
    """
    weights = {}
    for name, weight in model.named_parameters():
        if model.prefix in name:
            with whole([weight]):
                value = unsharded(weight)
                known = name.replace(".default.", ".").replace("_checkpoint_wrapped_module.", "")
                weights[known] = value.to("cpu", copy=True)
    return weights


@contextmanager
def adapter_file(model: PeftModel, weights: dict[str, torch.Tensor]) -> Iterator[Path]:
    """Provide a folder with the adapter in PEFT's format, in memory if there is room, readable by this user only."""
    size = sum(weight.nbytes for weight in weights.values())
    in_memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    with tempfile.TemporaryDirectory(prefix="adapter-", dir=SHARED_MEMORY if in_memory else None) as name:
        folder = Path(name)
        model.peft_config["default"].save_pretrained(name)
        save_file(weights, folder / "adapter_model.safetensors")
        for file in folder.iterdir():
            file.chmod(0o600)
        yield folder
